"""Small traces, and what an analysis says of one."""

import gzip
import json
from pathlib import Path
from typing import Any

from overlap_bench.harness.trace import analysis, trace_file
from overlap_bench.harness.trace.analysis import Part
from overlap_bench.harness.trace.events import Trace
from overlap_bench.harness.trace.result import result as traces_result
from tests.support import nsys_export as made
from tests.support.refusals import refusal

SPLIT: dict[str, made.Rows] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        made.kernel(1000, 2000, correlation=1),
        made.kernel(5000, 6000, correlation=2),
        made.kernel(7000, 8000, correlation=3),
        made.kernel(9000, 9500, correlation=99),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [made.copy(9500, 10000, correlation=4)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [
        made.call(500, 600, correlation=1),
        made.call(2400, 3300, correlation=7),
        made.call(4000, 4500, correlation=2),
        made.call(4600, 4700, correlation=3),
        made.call(4700, 4800, correlation=4),
    ],
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [
        made.synchronization(2500, 3200, correlation=7),
        made.synchronization(3400, 3900, correlation=7, kind=2),
    ],
}


def export(folder: Path, tables: dict[str, made.Rows], strings: tuple[str, ...] = ("gemm",)) -> Trace:
    return trace_file.read(made.write(folder / "export.sqlite", tables, strings))


def parts(trace: Trace) -> dict[str, Part]:
    return {each.name: each for each in analysis.analyse(trace)}


def part(trace: Trace, name: str) -> Part:
    return parts(trace)[name]


def values(found: Part, *key: str) -> dict[str, float | None]:
    """One row, by measure."""
    (row,) = [each for each in found.rows if each.key == key]
    return {name: value for (name, _), value in zip(found.measures, row.values, strict=True)}


def two(folder: Path) -> dict[str, Any]:
    after = {name: [dict(row) for row in rows] for name, rows in SPLIT.items()}
    after["CUPTI_ACTIVITY_KIND_MEMCPY"] = [made.copy(9500, 10000, source=0, correlation=4)]
    after["CUPTI_ACTIVITY_KIND_KERNEL"][1]["end"] = 6500
    found = []
    for name, tables in (("before", SPLIT), ("after", after)):
        trace = trace_file.read(made.write(folder / f"{name}.sqlite", tables, ("gemm",)))
        found.append((trace, analysis.analyse(trace)))
    return traces_result(found[0], found[1])


def refused(path: Path) -> str:
    return refusal(lambda: trace_file.read(path))


def complete(
    name: str,
    category: str,
    start: float,
    end: float,
    track: tuple[int | str, int | str],
    **args: object,
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "pid": track[0],
        "tid": track[1],
        "args": args,
    }


def written(path: Path, content: object) -> Path:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def launched(
    start: float,
    correlation: int,
    *,
    host: int | str = 9,
    gpu: int | str = 0,
    device: int = 0,
    **args: object,
) -> list[dict[str, object]]:
    """A call, and the kernel that it launches 30 us later on stream 7."""
    ids = {"correlation": correlation, **args}
    return [
        complete("cudaLaunchKernel", "cuda_runtime", start, start + 10, (host, host), **ids),
        complete("gemm", "kernel", start + 30, start + 80, (gpu, 7), device=device, stream=7, **ids),
    ]
