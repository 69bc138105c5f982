"""Results of SGLang's bench_serving (`--output-file`, one line each), with and without `--output-details`.

TTFT is the first chunk with text − the send, as ours. Its latency ends with [DONE], as ours; its TPOT is made
from that latency, ours ends with the last chunk that holds a token. Its ITL has two meanings: the gap between
two chunks, or that gap shared equally among the tokens of the second, which is neither of our two ITLs. The
gaps are shared on SGLang's own endpoint; on its OpenAI endpoints in the aggregates alone, and only where the
server speculates (accept_length). From shared gaps the chunks can be recovered, since the shares of one gap
agree to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Annotated

import msgspec

from overlap_bench.harness.store.manifest import NOT_RECORDED
from overlap_bench.harness.studies.imports import result
from overlap_bench.harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "sglang.bench_serving"
SHARED = ("sglang", "sglang-native")  # backends whose gaps are shared among the tokens of a chunk
SPECULATING = ("sglang-oai", "sglang-oai-chat")  # where they are in aggregates, if the server speculates
PER_CHUNK = (*SPECULATING, "vllm", "vllm-chat", "lmdeploy", "lmdeploy-chat", "trt", "gserver", "truss")
TPOT = "tpot_ms runs to the end of the stream ([DONE]), not to the last chunk that holds a token"
TOKENS = "tokens are as many as were asked for, unless the server counted them (usage)"
ASKED = ("backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
         "random_input_len", "random_output_len", "random_range_ratio")  # fmt: skip

DISTRIBUTIONS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_chunk_ms", "e2e_latency": "latency_ms"}


class Server(msgspec.Struct):
    version: str = ""
    model_path: str = NOT_RECORDED


class Said(result.Detailed, kw_only=True):
    backend: str
    duration: Annotated[float, msgspec.Meta(gt=0)]
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    mean_ttft_ms: float
    mean_itl_ms: float
    mean_e2e_latency_ms: float
    total_throughput: float | None = None  # newer files
    server_info: Server | None = None
    accept_length: float | None = None  # tokens of a step, where the server speculates

    @property
    def why_no_gaps(self) -> str:
        """Why the aggregates' ITL is no gap between chunks; "" where it is."""
        shared = "its ITL is shared among the tokens of a chunk, and is not converted"
        if self.backend in SHARED:
            return shared
        if self.backend in SPECULATING and self.accept_length is not None and not self.accept_length <= 0:
            return f"with speculation (accept_length {self.accept_length:g}) {shared}"
        return "" if self.backend in PER_CHUNK else f"what the ITL of {self.backend} is, is not known"


def recognised(document: Document) -> bool:
    own = {"backend", "output_throughput", "mean_e2e_latency_ms", "total_output_tokens_retokenized"}
    return own <= document.keys()


def read(document: Document) -> ToolResult:
    """Raises BadFile."""
    said = result.understood(document, Said, TOOL)
    server = said.server_info or Server()
    requests = said.requests(TOOL, partial(_sent, said.backend))
    if not said.completed:
        raise result.unserved(TOOL)
    told, unknown = result.measured(_told(document, said), DISTRIBUTIONS.values())
    lacks = [result.NO_SCHEDULE, result.NO_SEND]
    differs = [] if said.backend in SHARED else [TOKENS]
    if not said.mean_itl_ms and said.mean_ttft_ms == said.mean_e2e_latency_ms:
        lacks.append("a stream (--disable-stream): no TTFT, TPOT and ITL")
        told = {name: value for name, value in told.items() if not name.startswith(("ttft", "tpot", "itl"))}
        if requests:
            told["failed_requests"] = sum(each.error != "" for each in requests)
        else:
            told["failed_requests"] = math.nan
            lacks.append("the requests one by one (--output-details): no failures")
        requests = []
    elif requests:
        lacks.append("when each request ended: latency_ms is the file's own aggregate, as far as it has one")
        latency = {name: value for name, value in _told(document, said).items() if name.startswith("latency")}
        told, unknown = result.measured(latency, ["latency_ms"])
        lacks += unknown
        told["peak_concurrency"] = math.nan
        if said.backend not in (*SHARED, *PER_CHUNK):
            lacks.append(f"the chunks between the first and the last: {said.why_no_gaps}")
    else:
        lacks += ["the requests one by one (--output-details): no distributions, no failures", *unknown]
        told["failed_requests"] = math.nan
        differs.append(TPOT)
        if why := said.why_no_gaps:
            told = {name: value for name, value in told.items() if not name.startswith("itl")}
            lacks.append(f"gaps between chunks: {why}")
    return ToolResult(
        tool=TOOL,
        version=server.version and f"server {server.version}",
        model=server.model_path,
        asked=result.in_words({name: document.get(name) for name in ASKED}),
        seconds=said.duration,
        requests=requests,
        told=told,
        lacks=lacks,
        differs=differs,
    )


def _told(document: Document, said: Said) -> dict[str, float]:
    total = said.total_input_tokens + said.total_output_tokens
    return {
        "throughput_req_s": said.request_throughput,
        "throughput_tok_s": said.output_throughput,
        "throughput_total_tok_s": said.total_throughput or total / said.duration,
        **result.aggregates(document, DISTRIBUTIONS),
    }


def _sent(backend: str, number: int, row: result.Row) -> Sent:
    """Times count from the request's own send."""
    if row.failed:
        return Sent(sent_ns=0, error=row.failed)
    chunks = list(_chunks(backend, row))
    return Sent(
        sent_ns=0,
        chunk_ns=[at for at, _ in chunks],
        chunk_tokens=[held for _, held in chunks],
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
    )


def _chunks(backend: str, row: result.Row) -> Iterator[tuple[int, int]]:
    """Arrival and tokens of each chunk. Where a gap was shared among the tokens of a chunk, equal
    gaps in a row are one chunk's: two chunks' would agree to the last digit only by coincidence."""
    at, held = row.ttft, result.NOT_TOLD
    if backend in PER_CHUNK:
        for gap in (0.0, *row.gaps):
            at += gap
            yield result.ns(at), held
    elif backend in SHARED:
        first = row.completion_tokens - len(row.gaps)
        yield result.ns(at), first if first > 0 else held
        for share, group in groupby(row.gaps):
            held = len(list(group))
            at += share * held
            yield result.ns(at), held
    else:
        yield result.ns(at), held
        if row.gaps:
            yield result.NOT_TOLD, held
            yield result.ns(at + sum(row.gaps)), held
