"""Results of `vllm bench serve --save-result`, with and without `--save-detailed`.

TTFT is the first chunk − the send, TPOT (latency − TTFT)/(tokens − 1), ITL one sample per chunk, each as
ours. Its latency (E2EL) ends with the last chunk that holds a choice, ours with the end of the stream: the
usage message and [DONE] come after it. The client waits for a free place (`--max-concurrency`) before it
takes the send time, so none of its times counts from when a request was due.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Annotated

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.store.manifest import NOT_RECORDED
from overlap_bench.harness.studies.imports import result
from overlap_bench.harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "vllm bench serve"
DISTRIBUTIONS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_chunk_ms", "e2el": "latency_ms"}
ASKED = ("backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy",
         "ramp_up_start_rps", "ramp_up_end_rps")  # fmt: skip
E2EL = "latency_ms ends with the last chunk that holds a token (E2EL), not with the end of the stream"
CHAT = "ttft_ms ends with the first chunk of a chat, which may hold the role alone"
TOKENS = "how many tokens were generated (--skip-tokenizer-init): no throughput of tokens"
ANOTHER = ("user_throughput",)  # what TensorRT-LLM's client writes besides, which began as this one


class Said(result.Detailed, kw_only=True):
    """The keys that are looked at; the percentiles aside, whose names depend on what was asked for."""

    duration: Annotated[float, msgspec.Meta(gt=0)]
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    num_prompts: int
    date: str = ""
    backend: str = ""
    model_id: str = NOT_RECORDED
    tokenizer_id: str | None = ""
    failed: int | None = None
    request_goodput: float | None = None
    start_times: list[float] | None = None


def recognised(document: Document) -> bool:
    """Other programs took over its metrics, but hardly the name of the tokenizer that it counted with."""
    keys = document.keys()
    own = {"num_prompts", "request_throughput", "total_token_throughput", "tokenizer_id"}
    return own <= keys and not keys & set(ANOTHER)


def read(document: Document) -> ToolResult:
    """Raises BadFile."""
    if "total_output_tokens" not in document and "completed" in document:
        raise api.BadFile(f"a result of {TOOL} without output tokens: of an embedding or pooling endpoint")
    said = result.understood(document, Said, TOOL)
    requests = _requests(said)
    if not said.completed:
        raise result.unserved(TOOL, said.failed or said.num_prompts)
    lacks, differs = [result.NO_SCHEDULE], [E2EL]
    told, unknown = result.measured(
        _told(document, said, requests), () if requests else DISTRIBUTIONS.values()
    )
    lacks += unknown
    if not requests:
        lacks.append(
            "the requests one by one (--save-detailed): no distributions, percentiles as the file has them"
        )
        if said.failed is not None:
            differs += result.failures(said.failed, said.completed)
        else:
            told["failed_requests"] = math.nan
            if said.completed < said.num_prompts:
                lacks.append(f"whether all else of {said.num_prompts} prompts failed, or was not asked")
    elif said.start_times is None:
        lacks.append(result.NO_SEND)
        told["peak_concurrency"] = math.nan
    else:
        open_ends, unknown = result.unknown_ends(requests)
        told |= open_ends
        lacks += unknown
    if said.tokenizer_id is None and said.total_output_tokens <= said.completed:  # it then writes 1 for each
        told |= dict.fromkeys(("throughput_tok_s", "throughput_total_tok_s"), math.nan)
        lacks.append(TOKENS)
    if said.backend.endswith("-chat"):
        differs.append(CHAT)
    if "goodput_req_s" in told:
        lacks.append(result.NO_LIMITS)
    return ToolResult(
        tool=TOOL,
        measured=said.date,
        model=said.model_id,
        asked=result.in_words({name: document.get(name) for name in ASKED}),
        seconds=said.duration,
        requests=requests,
        told=told,
        lacks=[*lacks, "which data set was asked, and with which lengths"],
        differs=differs,
    )


def _told(document: Document, said: Said, requests: list[Sent]) -> dict[str, float]:
    """What can't be made from the requests."""
    goodput = {} if said.request_goodput is None else {"goodput_req_s": said.request_goodput}
    if requests:
        return goodput
    return {
        "throughput_req_s": said.request_throughput,
        "throughput_tok_s": said.output_throughput,
        "throughput_total_tok_s": said.total_token_throughput,
        **({} if said.failed is None else {"failed_requests": float(said.failed)}),
        **result.aggregates(document, DISTRIBUTIONS),
        **goodput,
    }


def _requests(said: Said) -> list[Sent]:
    """Empty where the file was saved without details."""
    starts, first = said.start_times, min(said.start_times or [0.0])

    def sent(number: int, row: result.Row) -> Sent:
        at = result.ns(starts[number] - first) if starts else 0
        if row.failed:
            return Sent(sent_ns=at, error=row.failed)
        chunks = [at + result.ns(after) for after in accumulate(row.gaps, initial=row.ttft)]
        tokens = row.completion_tokens
        return Sent(
            sent_ns=at,
            chunk_ns=chunks,
            chunk_tokens=[1 if tokens == len(chunks) else result.NOT_TOLD] * len(chunks),
            finished_ns=chunks[-1],
            prompt_tokens=row.prompt_tokens,
            completion_tokens=tokens,
        )

    if said.ttfts and starts and len(starts) != len(said.ttfts):
        raise result.uneven(TOOL)
    return said.requests(TOOL, sent)
