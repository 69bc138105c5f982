"""What a result file of another tool says, in our words; and what the tools' files have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.metrics.definitions import NS_PER_S
from overlap_bench.harness.store.manifest import NOT_RECORDED

NOT_TOLD = -1
STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}  # theirs: ours
NO_SCHEDULE = "when each request was due: no submit lag, no TTFT from schedule"
NO_LIMITS = "the limits that its goodput was counted by: goodput_req_s is as the file has it"
NO_SEND = "when each request was sent: no peak concurrency"
NO_TOKEN = "no token"  # why a request failed that ended without an error, and without an answer
# A time of 0 was never measured, nor was a throughput of 0 where requests were served: the tools write 0
# where they had no sample, or for requests without an answer. What is made of such a value is none either.
MADE_OF = {"tpot_ms": "ttft_ms", "throughput_total_tok_s": "throughput_tok_s"}
MAY_BE_0 = ("failed_requests", "goodput_req_s")

Document = Mapping[str, Any]  # a tool's JSON, as it stands
T = TypeVar("T")
LONGEST_S = 1e9  # of a time in a file: 30 years


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request. Stamps in ns of a clock that all requests of the file share, or since each one's own send
    where the file has no send times; NOT_TOLD where it does not say, as for chunks that it passes over. A
    request that failed has an `error`."""

    sent_ns: int
    scheduled_ns: int = NOT_TOLD
    chunk_ns: Sequence[int] = ()
    chunk_tokens: Sequence[int] = ()
    finished_ns: int = NOT_TOLD
    prompt_tokens: int = NOT_TOLD
    completion_tokens: int = 0
    error: str = ""


class Row(NamedTuple):
    """One request of the lists in Detailed. `failed` says why, where it did."""

    ttft: float
    gaps: Sequence[float]
    prompt_tokens: int
    completion_tokens: int
    failed: str


class Detailed(msgspec.Struct, kw_only=True):
    """The lists, one entry a request, seconds, that vLLM's and SGLang's tools write when told to."""

    input_lens: list[int] | None = None
    output_lens: list[int | None] | None = None
    ttfts: list[float | None] | None = None
    itls: list[list[float] | None] | None = None
    errors: list[str | None] | None = None

    def requests(self, tool: str, sent: Callable[[int, Row], Sent]) -> list[Sent]:
        """Each request by `sent`, which gets its number; none where the file was written without details.
        Raises BadFile where the lists differ in length, where a request that was served has a time that can't
        be, and where none was served."""
        rows = list(self._rows(tool))
        if rows and all(each.failed for each in rows):
            raise unserved(tool, len(rows), rows[0].failed)
        return [sent(number, row) for number, row in enumerate(rows)]

    def _rows(self, tool: str) -> Iterator[Row]:
        if self.ttfts is None or self.itls is None or self.input_lens is None or self.output_lens is None:
            return
        errors = self.errors or [None] * len(self.ttfts)
        lists = (self.ttfts, self.itls, self.input_lens, self.output_lens, errors)
        if len({len(each) for each in lists}) != 1:
            raise uneven(tool)
        for number, (ttft, gaps, prompt, tokens, error) in enumerate(zip(*lists, strict=True)):
            # Without an answer the tools still say how many tokens were asked for, and a TTFT of 0.
            reason = last_line(error) if error else "" if ttft and tokens else NO_TOKEN
            for each in (ttft or 0.0, *(gaps or ())):
                if not reason and not 0 <= each < math.inf:
                    raise api.BadFile(f"a result of {tool} was edited: request {number} took {each} s")
            yield Row(ttft or 0.0, gaps or (), prompt, tokens or 0, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """One benchmark by another tool: one boot of a server, one round.

    `told`: metrics by our names and in our units that the file gives as such, in place of what would be made
    from `requests`; NaN for one that must not be made from them, since the file does not say enough.
    """

    tool: str
    version: str = ""
    measured: str = ""  # when, as the file says it
    model: str = NOT_RECORDED
    asked: Mapping[str, str]  # the workload, in the tool's own words
    seconds: float  # of the benchmark: what throughput is divided by
    requests: Sequence[Sent] = ()  # none where the file holds aggregates alone
    told: Mapping[str, float]
    lacks: Sequence[str] = ()
    differs: Sequence[str] = ()


def understood(document: object, kind: type[T], tool: str) -> T:
    """The document as that struct. Raises BadFile, naming the key that is missing or not what it should
    be."""
    try:
        return msgspec.convert(document, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise api.BadFile(f"not a result of {tool} in a known form: {error}") from error


def unknown_prompts(sent: Sequence[Sent]) -> list[str]:
    """What is lacking where some request that was served does not say how long its prompt was."""
    count = sum(not each.error and each.prompt_tokens == NOT_TOLD for each in sent)
    return [f"how long the prompts of {count} requests were: no throughput of all tokens"] if count else []


def seconds(sent: Sequence[Sent]) -> float:
    """From the clock's 0 to the last end, or chunk, that a file tells."""
    return max(max(each.finished_ns, *each.chunk_ns, 0) for each in sent) / NS_PER_S


def unknown_ends(sent: Sequence[Sent]) -> tuple[dict[str, float], list[str]]:
    """What must not be made of requests, and what is lacking, where some do not say when they ended."""
    count = sum(each.finished_ns == NOT_TOLD for each in sent)
    if not count:
        return {}, []
    return {"peak_concurrency": math.nan}, [f"when {count} requests ended: no peak concurrency"]


def uneven(tool: str) -> api.BadFile:
    """To raise where a file's lists of requests do not go together."""
    return api.BadFile(f"a result of {tool} was edited: its lists of requests differ in length")


def unserved(tool: str, requests: int = 0, reason: str = "") -> api.BadFile:
    """To raise where a file's numbers are of no request."""
    count = f": of {requests}, all failed" if requests else ""
    why = f", the first with: {reason}" if reason else ""
    return api.BadFile(f"a result of {tool} in which no request was served{count}{why}")


def failures(failed: float, served: float) -> list[str]:
    """What has to be known of aggregates that are of a part of the requests."""
    if not failed:
        return []
    return [f"{failed:g} of {failed + served:g} requests failed: its statistics are of the other {served:g}"]


def last_line(error: str) -> str:
    return (error.strip().splitlines() or ["an error without words"])[-1]


def aggregates(document: Document, distributions: Mapping[str, str]) -> dict[str, float]:
    """Statistics of distributions by our names, from keys such as "median_ttft_ms": {"ttft": "ttft_ms"}.
    Raises BadFile."""
    return {
        f"{ours}_{name}": number(key, document[key])
        for theirs, ours in distributions.items()
        for statistic, name in STATISTICS.items()
        if document.get(key := f"{statistic}_{theirs}_ms") is not None
    }


def number(key: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise api.BadFile(f"{key} is {str(value)[:40]!r}, which is no number") from None


def measured(told: Mapping[str, float], wanted: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """What of a file's aggregates was measured, and a line for what was not; `wanted`: distributions that the
    tool has."""
    odd: dict[str, str] = {}
    for name, value in told.items():
        if not 0 <= value < math.inf or (value == 0 and name not in MAY_BE_0):
            odd.setdefault(of(name), f"{name} is {value:g} in the file, which is no measurement")
    odd |= {made: f"made of {whole}" for made, whole in MADE_OF.items() if whole in odd and made not in odd}
    kept = {name: value for name, value in told.items() if of(name) not in odd}
    none = [name for name in wanted if name not in map(of, told)]
    lines = [f"{name} ({why})" for name, why in odd.items() if name in map(of, told)]
    return kept, [*lines, *([f"statistics of {', '.join(none)}"] if none else [])]


def of(name: str) -> str:
    """The distribution whose statistic this is; any other name as it is."""
    before, _, statistic = name.rpartition("_")
    return before if statistic in STATISTICS.values() else name


def ns(seconds: float) -> int:
    """Raises BadFile for a time that no benchmark takes, and that 64 bits might not hold."""
    if not abs(seconds) < LONGEST_S:
        raise api.BadFile(f"a time of {seconds:g} s is none that was measured")
    return round(seconds * NS_PER_S)


def in_words(asked: Mapping[str, object]) -> dict[str, str]:
    """The workload as text, what was not asked left out."""
    return {name: str(value) for name, value in asked.items() if value not in (None, "")}
