"""Results of aiperf: its aggregates (profile_export_aiperf.json) or its requests (profile_export.jsonl).

TTFT is the first chunk with content − the send. Its inter-token latency is vLLM's TPOT, so ours; its
inter-chunk latency is our ITL by chunk. Its latency ends with the last response. Tokens are counted by its
own tokenizer, unless it was told to take the server's count, reasoning tokens included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.store.manifest import NOT_RECORDED
from overlap_bench.harness.studies.imports import result
from overlap_bench.harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "aiperf"
AGGREGATES, RECORDS = "profile_export_aiperf.json", "profile_export.jsonl"
DISTRIBUTIONS = {
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",
    "inter_chunk_latency": "itl_chunk_ms",
    "request_latency": "latency_ms",
}
TOTALS = {  # and the unit of each
    "goodput": ("goodput_req_s", "requests/sec"),
    "request_throughput": ("throughput_req_s", "requests/sec"),
    "output_token_throughput": ("throughput_tok_s", "tokens/sec"),
    "total_token_throughput": ("throughput_total_tok_s", "tokens/sec"),
    "error_request_count": ("failed_requests", "requests"),
}
STATISTICS = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
TOKENS = "tokens are the tool's own count, unless it was told to take the server's"
LATENCY = "latency_ms ends with the last response that was read, tpot_ms (aggregates) too"
RATES = (
    "throughput is over the tool's own start_time to end_time, not over the first send to the last response"
)
FACTORS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}  # to ms
WARMUP = "warmup"
OWN = ("aiperf_version", "error_summary", "was_cancelled")  # keys that genai-perf, which it replaces, has not
PER_CHUNK_USAGE = "endpoint.per_chunk_usage"


def in_ms(value: float, unit: str) -> float:
    factor: float = api.pick(unit, FACTORS, "unit of time")
    return value * factor


class Summary(msgspec.Struct):
    """What it says of one metric."""

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
    """What is looked at besides DISTRIBUTIONS and TOTALS, of which two are always there."""

    request_latency: Summary
    request_throughput: Summary
    benchmark_duration: Summary | None = None
    request_count: Summary | None = None
    aiperf_version: str = ""
    start_time: str = ""
    was_cancelled: bool | None = None
    is_complete: bool | None = None
    incomplete_reason: str | None = None
    input_config: dict[str, object] = {}


class Value(msgspec.Struct):
    value: float | list[float] | None
    unit: str

    @property
    def values(self) -> list[float]:
        return self.value if isinstance(self.value, list) else [] if self.value is None else [self.value]

    def ns(self) -> list[int]:
        """Its times. Raises BadFile."""
        times = [result.ns(in_ms(each, self.unit) / 1e3) for each in self.values]
        if min(times, default=0) < 0:
            raise api.BadFile(f"a time of {min(self.values):g} {self.unit} is none that was measured")
        return times


class Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class Metrics(msgspec.Struct):
    """Metrics of one request; a request without an answer has few of them."""

    time_to_first_token: Value | None = None
    inter_chunk_latency: Value | None = None
    output_sequence_length: Value | None = None
    input_sequence_length: Value | None = None


class Record(msgspec.Struct):
    metadata: Metadata
    metrics: Metrics | None = None
    error: dict[str, object] | None = None


def recognised(document: Document) -> bool:
    return "input_config" in document and not document.keys().isdisjoint(OWN)


def are_records(lines: Sequence[Document]) -> bool:
    return all(
        isinstance(metadata := line.get("metadata"), dict)
        and "request_start_ns" in metadata
        and "metrics" in line
        for line in lines
    )


def read(document: Document) -> ToolResult:
    """Aggregates. Raises BadFile."""
    count, failed = document.get("request_count"), {"error_request_count", "error_summary"} & document.keys()
    if failed and not (isinstance(count, dict) and count.get("avg")) and "request_latency" not in document:
        raise result.unserved(TOOL)
    said = result.understood(document, Aggregates, TOOL)
    asked = _flat("", said.input_config)
    told, lacks = _told(document)
    told, unknown = result.measured(told, DISTRIBUTIONS.values())
    lacks += unknown
    if asked.get(PER_CHUNK_USAGE) == "True":
        told = {name: value for name, value in told.items() if not name.startswith("tpot")}
        lacks.append("tpot_ms (with --per-chunk-usage it is per token behind the first chunk)")
    rate, duration = said.request_throughput.avg, said.benchmark_duration
    served = said.request_count.avg or 0.0 if said.request_count is not None else 0.0
    seconds = served / rate if rate else 0.0
    if duration is not None and duration.avg is not None:
        seconds = in_ms(duration.avg, duration.unit) / 1e3
    ended = [f"it ended early: {said.incomplete_reason or 'cancelled'}"]
    return ToolResult(
        tool=TOOL,
        version=said.aiperf_version,
        measured=said.start_time,
        model=_model(said.input_config),
        asked={name: value for name, value in asked.items() if name.startswith(("phases", "datasets"))},
        seconds=seconds,
        told=told,
        lacks=[
            result.NO_SCHEDULE,
            f"the requests one by one (they stand in {RECORDS}): no distributions, no peak concurrency",
            *lacks,
            *([result.NO_LIMITS] if "goodput_req_s" in told else []),
        ],
        differs=[
            LATENCY,
            RATES,
            TOKENS,
            *result.failures(told.get("failed_requests", 0), served),
            *(ended if said.was_cancelled or said.is_complete is False else []),
        ],
    )


def _told(document: Document) -> tuple[dict[str, float], list[str]]:
    """By our names, and a line for each whose unit is not known."""
    told: dict[str, float] = {}
    lacks: list[str] = []
    said = {
        name: result.understood(document[name], Summary, f"{TOOL}, {name},")
        for name in (*DISTRIBUTIONS, *TOTALS)
        if document.get(name) is not None
    }
    for theirs, ours in DISTRIBUTIONS.items():
        summary = said.get(theirs)
        if summary is not None and summary.unit in FACTORS:
            told |= {f"{ours}_{statistic}": value for statistic, value in summary.ms().items()}
        elif summary is not None:
            lacks.append(f"{ours} ({theirs} is in {summary.unit})")
    for theirs, (ours, unit) in TOTALS.items():
        summary = said.get(theirs)
        if summary is not None and summary.avg is not None and summary.unit == unit:
            told[ours] = summary.avg
        elif summary is not None:
            lacks.append(f"{ours} ({theirs} is in {summary.unit})")
    return told, lacks


def read_records(lines: Sequence[Document]) -> ToolResult:
    """Requests. Raises BadFile."""
    records = [result.understood(line, Record, f"{TOOL}, record {at},") for at, line in enumerate(lines, 1)]
    records = [each for each in records if each.metadata.benchmark_phase != WARMUP]
    if all(each.error is not None for each in records):
        raise result.unserved(TOOL, len(records), _failed(records[0]) if records else "")
    if not any(each.metrics and each.metrics.time_to_first_token for each in records):
        raise api.BadFile(
            f"records of {TOOL} without time_to_first_token: nothing was streamed (--streaming), or no reply "
            "held a token"
        )
    first = min(each.metadata.request_start_ns for each in records)
    sent = [_sent(each, first) for each in sorted(records, key=lambda each: each.metadata.request_start_ns)]
    if all(each.error for each in sent):
        raise result.unserved(TOOL, len(sent), sent[0].error)
    uncounted = sum(not each.error and not each.completion_tokens for each in sent)
    told, unknown = result.unknown_ends(sent)
    if uncounted:
        told |= dict.fromkeys(("throughput_tok_s", "throughput_total_tok_s"), math.nan)
        unknown.append(f"how many tokens {uncounted} requests got: no throughput of tokens")
    return ToolResult(
        tool=TOOL,
        asked=result.in_words({"requests": len(records)}),
        seconds=result.seconds(sent),
        requests=sent,
        told=told,
        lacks=[
            result.NO_SCHEDULE,
            f"model, workload and the tool's version (they stand in {AGGREGATES})",
            *unknown,
            *result.unknown_prompts(sent),
        ],
        differs=[TOKENS],
    )


def _sent(record: Record, first: int) -> Sent:
    """Times since the first send of the benchmark."""
    start, ended = record.metadata.request_start_ns - first, record.metadata.request_end_ns
    end = result.NOT_TOLD if ended is None else ended - first
    metrics = record.metrics or Metrics()
    ttft = [] if metrics.time_to_first_token is None else metrics.time_to_first_token.ns()
    tokens, prompt = _count(metrics.output_sequence_length), _count(metrics.input_sequence_length)
    reason = _failed(record) or ("" if any(ttft) and tokens else result.NO_TOKEN)
    if reason:
        return Sent(sent_ns=start, finished_ns=end, error=reason)
    gaps = [] if metrics.inter_chunk_latency is None else metrics.inter_chunk_latency.ns()
    chunks = [start + at for at in accumulate(gaps, initial=ttft[0])]
    return Sent(
        sent_ns=start,
        chunk_ns=chunks,
        chunk_tokens=[1 if tokens == len(chunks) else result.NOT_TOLD] * len(chunks),
        finished_ns=end,
        prompt_tokens=prompt,
        completion_tokens=max(0, tokens),
    )


def _failed(record: Record) -> str:
    if record.error is not None:
        return str(record.error.get("message") or record.error.get("type") or "failed")
    return "cancelled" if record.metadata.was_cancelled else ""


def _count(value: Value | None) -> int:
    """NOT_TOLD where there is none. Raises BadFile."""
    if value is None or not value.values:
        return result.NOT_TOLD
    count = value.values[0]
    if not 0 <= count < 1 << 63:
        raise api.BadFile(f"a count of {count:g} {value.unit} is none")
    return int(count)


def _model(config: dict[str, object]) -> str:
    models = config.get("models")
    items = models.get("items") if isinstance(models, dict) else None
    names = [str(each["name"]) for each in items or () if isinstance(each, dict) and "name" in each]
    return ", ".join(names) or NOT_RECORDED


def _flat(path: str, value: object) -> dict[str, str]:
    """Every leaf of a configuration, which has no stable schema, by its path; a list that holds one element
    is that element."""
    if isinstance(value, list):
        named = {str(index): each for index, each in enumerate(value)}
        return _flat(path, value[0] if len(value) == 1 else named)
    if isinstance(value, dict):
        return {
            name: each
            for key, inner in value.items()
            for name, each in _flat(f"{path}.{key}".lstrip("."), inner).items()
        }
    return {} if value is None else {path: str(value)}
