"""Tells which tool a result file is of, and reads it. Files are JSON: an object, one per line, or a list."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from overlap_bench.engines import api
from overlap_bench.harness.common.text_files import read_text
from overlap_bench.harness.studies.imports import aiperf, guidellm, sglang, vllm
from overlap_bench.harness.studies.imports.result import Document, ToolResult

TOOLS = (sglang, vllm, guidellm, aiperf)  # in the order in which they are asked whose a file is
MORE = "Extra data"  # what json says of a second value
# Python's knows Infinity and NaN, as the tools write them. What no 64 bits hold is no count and no time: as a
# float it has no digits that would be too many.
DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= 20 else float(digits))
# Half of a surrogate pair, which no file or screen takes.
HALF = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
KNOWN = ", ".join((vllm.TOOL, sglang.TOOL, guidellm.TOOL, aiperf.TOOL))
OTHERS = {  # by keys that they write, and no tool above does
    "genai-perf (aiperf's predecessor)": {"request_latency", "input_config"},
    "TensorRT-LLM's benchmark_serving": {"num_prompts", *vllm.ANOTHER},
    "vllm bench throughput": {"elapsed_time", "num_requests", "total_num_tokens"},
    "vllm bench latency": {"avg_latency", "percentiles"},
    "sglang.bench_one_batch_server": {"batch_size", "input_len", "output_len", "latency"},
    "sglang.bench_offline_throughput": {"successful_requests", "total_latency"},
    "pytest-benchmark": {"benchmarks", "machine_info"},
}
LONGEST = 200  # characters of a file's keys in a message


def read(name: str) -> ToolResult:
    """The one result that FILE holds, or the N-th of several as FILE:N. Raises BadSetting, one line."""
    path, number = split(name)
    documents = _documents(path)
    if number is None and len(documents) > 1:
        raise api.BadSetting(
            f"{path} holds {len(documents)} results: say which one, {path}:1 to {path}:{len(documents)}"
        )
    if number is not None and not 1 <= number <= len(documents):
        raise api.BadSetting(f"{path} holds {len(documents)} results, and {number} is none of them")
    try:
        return documents[(number or 1) - 1]()
    except api.BadFile as error:
        raise api.BadFile(f"{name}: {error}") from error


def split(name: str) -> tuple[Path, int | None]:
    """FILE or FILE:N."""
    before, colon, after = name.rpartition(":")
    if colon and after.isdigit() and not Path(name).exists():
        return Path(before), int(after)
    return Path(name), None


def _documents(path: Path) -> list[Callable[[], ToolResult]]:
    """What reads each result that the file holds."""
    objects = _objects(path)
    if aiperf.are_records(objects):
        return [partial(aiperf.read_records, objects)]
    found: list[Callable[[], ToolResult]] = []
    for each in objects:
        tool = next((tool for tool in TOOLS if tool.recognised(each)), None)
        if tool is None:
            raise api.BadFile(f"{path} is not a result of {KNOWN}: {_looks(each)}")
        parts = guidellm.benchmarks(each) if tool is guidellm else [each]
        found += [partial(tool.read, part) for part in parts]
    if not found:
        raise api.BadFile(f"{path} holds no result")
    return found


def _looks(document: Document) -> str:
    """What an unknown file may be."""
    other = next((name for name, keys in OTHERS.items() if keys <= document.keys()), None)
    return f"it looks like one of {other}" if other else f"it has {json.dumps(list(document))[:LONGEST]}"


def _objects(path: Path) -> list[Document]:
    """The objects of a JSON file, which may hold one, one a line, or a list of them."""
    text = HALF.sub(r"\\ufffd", read_text(path))
    if not text.strip():
        raise api.BadFile(f"{path} is empty")
    try:
        values = [DECODER.decode(text)]
    except json.JSONDecodeError as error:
        lines = enumerate(text.split("\n") if error.msg == MORE else [text], 1)
        values = [_decoded(path, number, line) for number, line in lines if line.strip()]
    except RecursionError:
        raise api.BadFile(f"{path} is not a result of {KNOWN}: its lists are too deep") from None
    found = [each for value in values for each in (value if isinstance(value, list) else [value])]
    for each in found:
        if not isinstance(each, dict):
            raise api.BadFile(f"{path} is not a result of {KNOWN}: it holds {json.dumps(each)[:LONGEST]}")
    return found


def _decoded(path: Path, number: int, text: str) -> Any:
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        where = f"line {number + error.lineno - 1}"
        raise api.BadFile(
            f"{path} {'is cut short' if cut else 'is not JSON'} at {where}: {error.msg}"
        ) from None
