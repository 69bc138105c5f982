"""Results of guidellm: one benchmark of its JSON report.

Its inter-token latency is our TPOT, (last token − first token)/(tokens − 1); its time per output token
includes the first token, and is not. Its distributions of rates are over time, not over the benchmark;
throughput is made here from the requests. It tells the first and the last chunk of a request, and none in
between.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.store.manifest import NOT_RECORDED
from overlap_bench.harness.studies.imports import result
from overlap_bench.harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "guidellm"
TOKENS = "tokens are the server's count where it tells one, else one for each chunk"


class Timings(msgspec.Struct):
    """Seconds since the epoch."""

    request_start: float | None = None
    targeted_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None
    token_iterations: int = 0
    request_end: float | None = None
    resolve_end: float | None = None


class Info(msgspec.Struct):
    timings: Timings
    error: str | None = None


class Request(msgspec.Struct):
    info: Info
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Requests(msgspec.Struct):
    successful: list[Request]
    errored: list[Request] = []
    incomplete: list[Request] = []


class Config(msgspec.Struct):
    strategy: dict[str, object]
    backend: dict[str, object] = {}
    requests: dict[str, object] = {}


class Made(msgspec.Struct):
    successful: int | None = None


class SchedulerMetrics(msgspec.Struct):
    requests_made: Made | None = None


class Benchmark(msgspec.Struct):
    config: Config
    requests: Requests
    scheduler_metrics: SchedulerMetrics


class Report(msgspec.Struct):
    """A report with one of its benchmarks; see `benchmarks`."""

    benchmarks: list[Benchmark]
    metadata: dict[str, object] | None = None


def recognised(document: Document) -> bool:
    """Others write a list of that name too, pytest-benchmark for one."""
    benchmarks, metadata = document.get("benchmarks"), document.get("metadata")
    named = isinstance(metadata, dict) and "guidellm_version" in metadata
    return isinstance(benchmarks, list) and (named or any(map(_is_benchmark, benchmarks)))


def _is_benchmark(value: object) -> bool:
    requests = value.get("requests") if isinstance(value, dict) else None
    return isinstance(requests, dict) and "successful" in requests


def benchmarks(report: Document) -> list[Document]:
    """The report once for each of its benchmarks."""
    return [{**report, "benchmarks": [each]} for each in report["benchmarks"]]


def read(document: Document) -> ToolResult:
    """Raises BadFile."""
    said = result.understood(document, Report, TOOL)
    (benchmark,) = said.benchmarks
    requests = benchmark.requests
    kept = [*requests.successful, *requests.errored]
    made = benchmark.scheduler_metrics.requests_made
    if made is not None and made.successful is not None and made.successful > len(requests.successful):
        raise api.BadFile(
            f"a report of {TOOL} with {len(requests.successful)} of {made.successful} requests: it kept only "
            "a sample (--sample-requests), and nothing can be made from that"
        )
    times = [each.info.timings for each in kept]
    starts = [each.request_start for each in times if each.request_start is not None]
    if not starts or not requests.successful:
        raise result.unserved(TOOL, len(kept))
    if not any(each.info.timings.first_token_iteration for each in requests.successful):
        raise api.BadFile(
            f"a report of {TOOL} whose requests lack the first token's time: nothing was streamed, no reply "
            "held a token, or it is of a version that is not known here"
        )
    first = min([*starts, *(each.targeted_start for each in times if each.targeted_start is not None)])
    sent = [_sent(each, first, failed=index >= len(requests.successful)) for index, each in enumerate(kept)]
    told, unknown = result.unknown_ends(sent)
    lacks = ["the chunks between the first and the last of a request: no ITL", *unknown]
    lacks += result.unknown_prompts(sent)
    if requests.incomplete:
        lacks.append(
            f"{len(requests.incomplete)} requests that the end of the benchmark cut off are left out"
        )
    config = benchmark.config
    return ToolResult(
        tool=TOOL,
        version=str((said.metadata or {}).get("guidellm_version", "")),
        measured=_moment(first),
        model=str(config.backend.get("model") or NOT_RECORDED),
        asked=result.in_words({**dict(sorted(config.strategy.items())), "data": config.requests.get("data")}),
        seconds=result.seconds(sent) - (min(starts) - first),
        requests=sent,
        told=told,
        lacks=lacks,
        differs=[TOKENS],
    )


def _moment(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # no year has it
        return ""


def _sent(request: Request, first: float, failed: bool) -> Sent:
    """Times since `first`, the first moment at which a request was due or sent."""
    timings = request.info.timings

    def since(at: float | None) -> int:
        return result.NOT_TOLD if at is None else result.ns(at - first)

    start, due = since(timings.request_start), since(timings.targeted_start)
    finished = since(timings.request_end or timings.resolve_end)
    if failed:
        reason = request.info.error or "failed"
        return Sent(sent_ns=max(0, start), scheduled_ns=due, finished_ns=finished, error=reason)
    edges = [timings.first_token_iteration, timings.last_token_iteration]
    if not all(edges) or not request.output_tokens:
        return Sent(sent_ns=start, scheduled_ns=due, finished_ns=finished, error=result.NO_TOKEN)
    chunks = [since(at) for at in edges]
    if timings.token_iterations > 1:  # of two the gap is known: alone it would stand for all requests
        chunks.insert(1, result.NOT_TOLD)
    else:
        del chunks[1:]
    return Sent(
        sent_ns=start,
        scheduled_ns=due,
        chunk_ns=chunks,
        chunk_tokens=[result.NOT_TOLD] * len(chunks),
        finished_ns=finished,
        prompt_tokens=result.NOT_TOLD if request.prompt_tokens is None else request.prompt_tokens,
        completion_tokens=request.output_tokens,
    )
