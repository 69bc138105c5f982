"""Results of SGLang's bench_serving (`--output-file`, one line each), with and without `--output-details`.

TTFT is the first chunk with text − the send, as ours. Its latency ends with [DONE], as ours; its TPOT is made
from that latency, ours ends with the last chunk that holds a token. Its ITL, on SGLang's own endpoint, is the
gap between two chunks shared equally among the tokens of the second: neither of our two ITLs. From the
details the chunks can be recovered, since the shares of one gap agree to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated

import msgspec

from harness.store.manifest import NOT_RECORDED
from harness.studies.imports import result
from harness.studies.imports.result import Document, Sent, ToolResult

TOOL = "sglang.bench_serving"
SHARED_ITL = ("sglang", "sglang-native")  # backends whose gaps are shared among the tokens of a chunk
TPOT = "tpot_ms runs to the end of the stream ([DONE]), not to the last chunk that holds a token"
ASKED = ("backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
         "random_input_len", "random_output_len", "random_range_ratio", "completed")  # fmt: skip


class Server(msgspec.Struct):
    """Of `server_info`, which a server of SGLang tells."""

    version: str = ""
    model_path: str = NOT_RECORDED


class Said(result.Detailed, kw_only=True):
    backend: str
    request_rate: float | str
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
    dataset_name: str | None = None
    max_concurrency: int | None = None
    sharegpt_output_len: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float | None = None
    server_info: Server | None = None


def recognised(document: Document) -> bool:
    return {"backend", "output_throughput", "mean_e2e_latency_ms"} <= document.keys()


def read(document: Document) -> ToolResult:
    """Raises BadFile."""
    said = result.understood(document, Said, TOOL)
    server = said.server_info or Server()
    requests = said.requests(TOOL, partial(_sent, said.backend in SHARED_ITL))
    told = _told(document, said)
    lacks = [result.NO_SCHEDULE, result.NO_SEND]
    differs = []
    if not said.mean_itl_ms and said.mean_ttft_ms == said.mean_e2e_latency_ms:
        lacks.append("a stream (--disable-stream): no TTFT, TPOT and ITL")
        told = {name: value for name, value in told.items() if not name.startswith(("ttft", "tpot", "itl"))}
        requests = []
    elif requests:
        lacks.append("when each request ended: latency_ms is the file's own aggregate, as far as it has one")
        told = {name: value for name, value in told.items() if name.startswith("latency")}
        told["peak_concurrency"] = float("nan")
    else:
        lacks.append("the requests one by one (--output-details): no distributions")
        differs.append(TPOT)
        if said.backend in SHARED_ITL:
            lacks.append(
                "gaps between chunks: its ITL is shared among the tokens of a chunk, and is not converted"
            )
    return ToolResult(
        tool=TOOL,
        version=server.version and f"server {server.version}",
        model=server.model_path,
        asked=result.fields(said, *ASKED),
        seconds=said.duration,
        requests=requests,
        told=told,
        lacks=lacks,
        differs=differs,
    )


def _told(document: Document, said: Said) -> dict[str, float]:
    told = {"throughput_req_s": said.request_throughput, "throughput_tok_s": said.output_throughput}
    total = said.total_input_tokens + said.total_output_tokens
    told["throughput_total_tok_s"] = said.total_throughput or total / said.duration
    distributions = {"ttft": "ttft_ms", "e2e_latency": "latency_ms"}
    if said.total_output_tokens > said.completed:  # without a sample the tool writes 0
        distributions["tpot"] = "tpot_ms"
        if said.backend not in SHARED_ITL:
            distributions["itl"] = "itl_chunk_ms"
    return told | result.aggregates(document, distributions)


def _sent(shared: bool, number: int, row: result.Row) -> Sent:
    """Times count from the request's own send."""
    if row.failed:
        return Sent(sent_ns=0, error=row.failed)
    chunks = list(_chunks(row.ttft, row.gaps, row.completion_tokens, shared))
    return Sent(
        sent_ns=0,
        chunk_ns=[at for at, _ in chunks],
        chunk_tokens=[held for _, held in chunks],
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
    )


def _chunks(ttft: float, gaps: Sequence[float], tokens: int, shared: bool) -> Iterator[tuple[int, int]]:
    """Arrival and tokens of each chunk. Where a gap was shared among the tokens of a chunk, equal
    gaps in a row are one chunk's: two chunks' would agree to the last digit only by coincidence."""
    at = ttft
    if not shared:
        yield result.ns(at), result.NOT_TOLD
        for gap in gaps:
            at += gap
            yield result.ns(at), result.NOT_TOLD
        return
    yield result.ns(at), tokens - len(gaps)
    for share, group in groupby(gaps):
        held = len(list(group))
        at += share * held
        yield result.ns(at), held
