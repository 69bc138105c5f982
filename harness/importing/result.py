"""What a result file of another tool says, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from engines import api
from harness.metrics import NS_PER_S
from harness.store import NOT_RECORDED

NOT_TOLD = -1
STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}  # theirs: ours
NO_SCHEDULE = "when each request was due: no submit lag, no TTFT from schedule"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request. Stamps in ns of a clock that all requests of the file share, NOT_TOLD where it does not
    say.

    `chunk_ns`: arrival of each chunk that holds tokens; NOT_TOLD stands for those in between that the file
    does not tell. A request that failed has an `error`.
    """

    sent_ns: int
    scheduled_ns: int = NOT_TOLD
    chunk_ns: Sequence[int] = ()
    chunk_tokens: Sequence[int] = ()
    finished_ns: int = NOT_TOLD
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One benchmark by another tool: one boot of a server, one round.

    `told`: metrics by our names and in our units that the file gives as such, in place of what would be made
    from `requests`; NaN for one that must not be made from them, the file not telling enough.
    """

    tool: str
    version: str = ""
    measured: str = ""  # when, as the file says it
    model: str = NOT_RECORDED
    asked: Mapping[str, str]  # the workload, in the tool's own words
    seconds: float  # of the benchmark, as the tool divides by it
    requests: Sequence[Sent] = ()  # none where the file holds aggregates alone
    told: Mapping[str, float]
    lacks: Sequence[str] = ()
    differs: Sequence[str] = ()


def understood(document: Any, kind: type[T], tool: str) -> T:
    """The document as that struct. Raises BadSetting, naming the key that is missing or not what it should
    be."""
    try:
        return msgspec.convert(document, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise api.BadSetting(f"no result of {tool} as it is known here: {error}") from error


def aggregates(document: Mapping[str, Any], theirs: str, ours: str) -> dict[str, float]:
    """Statistics of one distribution by our names, from keys such as "median_ttft_ms": theirs "ttft"."""
    found = {}
    for statistic, name in STATISTICS.items():
        value = document.get(f"{statistic}_{theirs}_ms")
        if isinstance(value, int | float):
            found[f"{ours}_{name}"] = float(value)
    return found


def ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def in_words(**asked: object) -> dict[str, str]:
    """The workload as text, what was not asked left out."""
    return {name: str(value) for name, value in asked.items() if value not in (None, "")}
