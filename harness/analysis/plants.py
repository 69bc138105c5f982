"""Whether a delay that was planted (`--plant`) was found, from a comparison of `--format json`."""

from __future__ import annotations

from harness.analysis.result import Comparison


def achieved(comparison: Comparison) -> float | None:
    """What was really planted, by the engine's counter, as a share of the before arm's mean decode step. The
    before arm's own reading, near zero, is the hook's cost and is subtracted. None where there is none."""
    row = comparison.mechanism.get("planted_share")
    if row is None or row.before is None or row.after is None:
        return None
    return row.after - row.before


def expected(share: float, better: str) -> float:
    """The change in a time, or in a rate, from a step longer by `share`, where nothing absorbs it."""
    return share if better == "lower" else 1 / (1 + share) - 1


def seen(comparison: Comparison) -> bool:
    """The primary got worse, and its interval holds what was planted."""
    share, row = achieved(comparison), comparison.metrics[comparison.primary]
    if share is None or row.ci_low is None or row.ci_high is None:
        return False
    inside = row.ci_low <= expected(share, row.better) <= row.ci_high
    return row.verdict in ("slower", "worse") and inside
