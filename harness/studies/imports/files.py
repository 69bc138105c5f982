"""Tells which tool a result file is of, and reads it. Files are JSON: an object, one per line, or a list."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from overlap_bench.engines import api
from overlap_bench.harness.common.text_files import read_text
from overlap_bench.harness.studies.imports import aiperf, guidellm, sglang, vllm
from overlap_bench.harness.studies.imports.result import Document, ToolResult

TOOLS = (sglang, vllm, guidellm, aiperf)  # in the order in which they are asked whose a file is
MORE = "Extra data"  # what json says of a second value
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
    """The objects of a JSON file, which may hold one, one a line, or a list of them. By Python's decoder, as
    the tools write Infinity and NaN."""
    text = read_text(path)
    if not text.strip():
        raise api.BadFile(f"{path} is empty")
    try:
        whole = json.loads(text)
        values = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError as error:
        if error.msg != MORE:
            raise _not_json(path, error.lineno, error) from None
        values = list(_of_lines(path, text))
    for each in values:
        if not isinstance(each, dict):
            raise api.BadFile(f"{path} is not a result of {KNOWN}: it holds {json.dumps(each)[:LONGEST]}")
    return values


def _of_lines(path: Path, text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise _not_json(path, number, error) from None


def _not_json(path: Path, line: int, error: json.JSONDecodeError) -> api.BadFile:
    cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
    return api.BadFile(f"{path} {'is cut short' if cut else 'is not JSON'} at line {line}: {error.msg}")
