"""Results of `vllm bench serve --save-result`, with and without `--save-detailed`.

TTFT is the first chunk − the send, TPOT (latency − TTFT)/(tokens − 1), ITL one sample per chunk, each as
ours. Its latency (E2EL) ends with the last chunk that holds a choice, ours with the end of the stream: the
usage message and [DONE] come after it. The client waits for a free place (`--max-concurrency`) before it
takes the send time, so none of its times counts from when a request was due.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from engines import api
from harness.store.manifest import NOT_RECORDED
from harness.studies.imports.result import (
    NO_SCHEDULE,
    NOT_TOLD,
    Detailed,
    Sent,
    ToolResult,
    aggregates,
    in_words,
    ns,
    understood,
    uneven,
)

TOOL = "vllm bench serve"
DISTRIBUTIONS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_chunk_ms", "e2el": "latency_ms"}
E2EL = "latency_ms ends with the last chunk that holds a token (E2EL), not with the end of the stream"


class Document(Detailed, kw_only=True):
    """The keys that are looked at; the percentiles aside, whose names depend on what was asked for."""

    duration: Annotated[float, msgspec.Meta(gt=0)]
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    num_prompts: int
    request_rate: float | str
    date: str = ""
    backend: str = ""
    model_id: str = NOT_RECORDED
    burstiness: float | None = None
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    failed: int | None = None
    start_times: list[float] | None = None


def recognised(document: Mapping[str, Any]) -> bool:
    return {"num_prompts", "request_throughput", "total_token_throughput"} <= document.keys()


def read(document: Mapping[str, Any]) -> ToolResult:
    """Raises BadFile."""
    if "total_output_tokens" not in document and "completed" in document:
        raise api.BadFile(f"a result of {TOOL} without output tokens: of an embedding or pooling endpoint")
    said = understood(document, Document, TOOL)
    requests = _requests(said)
    lacks = [NO_SCHEDULE]
    told: dict[str, float] = {}
    if requests:
        if said.start_times is None:
            lacks.append("when each request was sent: no peak concurrency")
            told["peak_concurrency"] = float("nan")
    else:
        lacks.append(
            "the requests one by one (--save-detailed): no distributions, percentiles as the file has them"
        )
        told = _told(document, said)
    return ToolResult(
        tool=TOOL,
        measured=said.date,
        model=said.model_id,
        asked=in_words(
            backend=said.backend,
            num_prompts=said.num_prompts,
            request_rate=said.request_rate,
            burstiness=said.burstiness,
            max_concurrency=said.max_concurrency,
            ramp_up_strategy=said.ramp_up_strategy,
            ramp_up_start_rps=said.ramp_up_start_rps,
            ramp_up_end_rps=said.ramp_up_end_rps,
        ),
        seconds=said.duration,
        requests=requests,
        told=told,
        lacks=[*lacks, "which data set was asked, and with which lengths"],
        differs=[E2EL],
    )


def _told(document: Mapping[str, Any], said: Document) -> dict[str, float]:
    told = {
        "throughput_req_s": said.request_throughput,
        "throughput_tok_s": said.output_throughput,
        "throughput_total_tok_s": said.total_token_throughput,
    }
    if said.failed is not None:
        told["failed_requests"] = float(said.failed)
    one_token_each = said.total_output_tokens <= said.completed
    for theirs, ours in DISTRIBUTIONS.items():
        if theirs in ("tpot", "itl") and one_token_each:
            continue  # without a sample the tool writes 0
        told |= aggregates(document, theirs, ours)
    return told


def _requests(said: Document) -> list[Sent]:
    """Empty where the file was saved without details."""
    rows = list(said.rows(TOOL))
    if not rows:
        return []
    starts = said.start_times or [0.0] * len(rows)
    if len(starts) != len(rows):
        raise uneven(TOOL)
    first = min(starts)
    found = []
    for start, row in zip(starts, rows, strict=True):
        sent = ns(start - first)
        if row.failed:
            found.append(Sent(sent_ns=sent, finished_ns=sent, error=row.failed))
            continue
        chunks = [sent + ns(at) for at in accumulate(row.gaps, initial=row.ttft)]
        tokens = row.completion_tokens
        found.append(
            Sent(
                sent_ns=sent,
                chunk_ns=chunks,
                chunk_tokens=[1] * tokens if tokens == len(chunks) else [NOT_TOLD] * len(chunks),
                finished_ns=chunks[-1],
                prompt_tokens=row.prompt_tokens,
                completion_tokens=tokens,
            )
        )
    return found
