"""Results of aiperf: its aggregates (profile_export_aiperf.json) or its requests (profile_export.jsonl).

TTFT is the first chunk with content − the send. Its inter-token latency is vLLM's TPOT, so ours; its
inter-chunk latency is our ITL by chunk. Its latency ends with the last response. Tokens are counted by its
own tokenizer, unless it was told to take the server's count, reasoning tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from engines import api
from harness.metrics.definitions import NS_PER_MS, NS_PER_S
from harness.store.manifest import NOT_RECORDED
from harness.studies.imports import result
from harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "aiperf"
AGGREGATES, RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"
DISTRIBUTIONS = {
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",
    "inter_chunk_latency": "itl_chunk_ms",
    "request_latency": "latency_ms",
}
TOTALS = {
    "goodput": "goodput_req_s",
    "request_throughput": "throughput_req_s",
    "output_token_throughput": "throughput_tok_s",
    "total_token_throughput": "throughput_total_tok_s",
    "error_request_count": "failed_requests",
}
STATISTICS = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
TOKENS = "tokens are the tool's own count, unless it was told to take the server's"
LATENCY = "latency_ms ends with the last response that was read, tpot_ms (aggregates) too"
RATES = (
    "throughput is over the tool's own start_time to end_time, not over the first send to the last response"
)
FACTORS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}  # to ms
WARMUP = "warmup"


def in_ms(value: float, unit: str) -> float:
    factor: float = api.pick(unit, FACTORS, "unit of time")
    return value * factor


class Summary(msgspec.Struct):
    """Of one metric."""

    unit: str
    avg: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    def ms(self) -> dict[str, float]:
        """By our statistics. Raises BadFile."""
        found = {ours: getattr(self, theirs) for theirs, ours in STATISTICS.items()}
        return {name: in_ms(value, self.unit) for name, value in found.items() if value is not None}


class Aggregates(msgspec.Struct):
    request_latency: Summary
    request_throughput: Summary
    benchmark_duration: Summary | None = None
    request_count: Summary | None = None
    error_request_count: Summary | None = None
    output_token_throughput: Summary | None = None
    total_token_throughput: Summary | None = None
    goodput: Summary | None = None
    time_to_first_token: Summary | None = None
    inter_token_latency: Summary | None = None
    inter_chunk_latency: Summary | None = None
    aiperf_version: str = ""
    start_time: str = ""
    input_config: dict[str, object] = {}


class Value(msgspec.Struct):
    value: float | list[float]
    unit: str

    def ms(self) -> list[float]:
        """Its value or values. Raises BadFile."""
        values = self.value if isinstance(self.value, list) else [self.value]
        return [in_ms(each, self.unit) for each in values]


class Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str = "profiling"


class Record(msgspec.Struct):
    metadata: Metadata
    metrics: dict[str, Value] = {}
    error: dict[str, object] | None = None


def recognised(document: Document) -> bool:
    return isinstance(document.get("request_latency"), dict) and "request_throughput" in document


def are_records(lines: Sequence[Document]) -> bool:
    return all({"metadata", "metrics"} <= line.keys() for line in lines)


def read(document: Document) -> ToolResult:
    """Aggregates. Raises BadFile."""
    said = result.understood(document, Aggregates, TOOL)
    told: dict[str, float] = {}
    for theirs, ours in DISTRIBUTIONS.items():
        summary: Summary | None = getattr(said, theirs)
        if summary is not None:
            told |= {f"{ours}_{statistic}": value for statistic, value in summary.ms().items()}
    for theirs, ours in TOTALS.items():
        summary = getattr(said, theirs)
        if summary is not None and summary.avg is not None:
            told[ours] = summary.avg
    count, rate, duration = said.request_count, said.request_throughput.avg, said.benchmark_duration
    seconds = 0.0
    if duration is not None and duration.avg is not None:
        seconds = in_ms(duration.avg, duration.unit) / 1e3
    elif count is not None and count.avg and rate:
        seconds = count.avg / rate
    return ToolResult(
        tool=TOOL,
        version=said.aiperf_version,
        measured=said.start_time,
        model=_model(said.input_config),
        asked=_asked(said.input_config),
        seconds=seconds,
        told=told,
        lacks=[
            result.NO_SCHEDULE,
            f"the requests one by one (they stand in {RECORDS}): no distributions, no peak concurrency",
            *([result.NO_LIMITS] if "goodput_req_s" in told else []),
        ],
        differs=[LATENCY, RATES, TOKENS],
    )


def read_records(lines: Sequence[Document]) -> ToolResult:
    """Requests. Raises BadFile."""
    records = [result.understood(line, Record, TOOL) for line in lines]
    records = [each for each in records if each.metadata.benchmark_phase != WARMUP]
    if all(each.error is not None for each in records):
        raise api.BadFile(f"records of {TOOL} in which no request was served")
    first = min(each.metadata.request_start_ns for each in records)
    sent = [_sent(each, first) for each in sorted(records, key=lambda each: each.metadata.request_start_ns)]
    return ToolResult(
        tool=TOOL,
        asked=result.in_words({"requests": len(records)}),
        seconds=max(each.finished_ns for each in sent) / NS_PER_S,
        requests=sent,
        told={},
        lacks=[
            result.NO_SCHEDULE,
            f"model, workload and the tool's version (they stand in {AGGREGATES})",
            *result.unknown_prompts(sent),
        ],
        differs=[TOKENS],
    )


def _sent(record: Record, first: int) -> Sent:
    """Times since the first send of the benchmark."""
    start, end = (at - first for at in (record.metadata.request_start_ns, record.metadata.request_end_ns))
    if record.error is not None:
        reason = str(record.error.get("message") or record.error.get("type") or "failed")
        return Sent(sent_ns=start, finished_ns=end, error=reason)
    metrics = record.metrics
    for name in ("time_to_first_token", "output_sequence_length"):
        if name not in metrics:
            raise api.BadFile(
                f"records of {TOOL} without {name}: the endpoint was not streamed (--streaming)"
            )
    (ttft,) = metrics["time_to_first_token"].ms()
    gaps = metrics["inter_chunk_latency"].ms() if "inter_chunk_latency" in metrics else []
    chunks = [start + round(at * NS_PER_MS) for at in accumulate(gaps, initial=ttft)]
    tokens, prompt = (_count(metrics, name) for name in ("output_sequence_length", "input_sequence_length"))
    return Sent(
        sent_ns=start,
        chunk_ns=chunks,
        chunk_tokens=[1 if tokens == len(chunks) else result.NOT_TOLD] * len(chunks),
        finished_ns=end,
        prompt_tokens=prompt,
        completion_tokens=tokens,
    )


def _count(metrics: dict[str, Value], name: str) -> int:
    value = metrics[name].value if name in metrics else result.NOT_TOLD
    return int(value[0] if isinstance(value, list) else value)


def _model(config: dict[str, object]) -> str:
    models = config.get("models")
    items = models.get("items") if isinstance(models, dict) else None
    names = [str(each["name"]) for each in items or () if isinstance(each, dict) and "name" in each]
    return ", ".join(names) or NOT_RECORDED


def _asked(config: dict[str, object]) -> dict[str, str]:
    """What its configuration says of load and input, which has no stable schema."""
    asked: dict[str, str] = {}
    for part in ("phases", "datasets"):
        asked |= _flat(part, config.get(part))
    return asked


def _flat(path: str, value: object) -> dict[str, str]:
    """Every leaf by its path; a list that holds one element is that element."""
    if isinstance(value, list):
        named = {str(index): each for index, each in enumerate(value)}
        return _flat(path, value[0] if len(value) == 1 else named)
    if isinstance(value, dict):
        return {
            name: each for key, inner in value.items() for name, each in _flat(f"{path}.{key}", inner).items()
        }
    return {} if value is None else {path: str(value)}
