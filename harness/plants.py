"""Whether a delay that was planted (`--plant`) was found, from a comparison of `--format json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def achieved(comparison: Mapping[str, Any]) -> float | None:
    """What was really planted, by the engine's counter, as a share of the before arm's mean decode step. The
    before arm's own, near zero, is the price of the hook and not part of it. None where nothing was."""
    row = comparison["mechanism"].get("planted_share")
    if row is None or row["before"] is None or row["after"] is None:
        return None
    return float(row["after"] - row["before"])


def expected(share: float, better: str) -> float:
    """The change that a step longer by `share` makes, where nothing absorbs it: of a time, or of a rate."""
    return share if better == "lower" else 1 / (1 + share) - 1


def seen(comparison: Mapping[str, Any]) -> bool:
    """The primary got worse, and its interval holds what was planted."""
    share, row = achieved(comparison), comparison["metrics"][comparison["primary"]]
    if share is None or row["ci_low"] is None:
        return False
    inside = row["ci_low"] <= expected(share, row["better"]) <= row["ci_high"]
    return row["verdict"] in ("slower", "worse") and inside
