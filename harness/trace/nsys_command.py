"""The commands of Nsight Systems: capture one arm's window, and export what was captured to SQLite.

The capture range is the NVTX range that the engine's window is inside of: that works with and without CUDA,
and needs no call into it. Nothing is sampled, so that what is traced is disturbed as little as can be.
`graph` gives one row per replay of a CUDA graph, `node` one per kernel in it, at up to 2.4 times the time per
token: look at kernels with it, never at times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.tracing import WINDOW, WINDOW_DOMAIN

GRAPH_TRACES = ("graph", "node")
REPORT, EXPORT = ".nsys-rep", ".sqlite"
RANGE = f"{WINDOW}@{WINDOW_DOMAIN}"
BEGAN = "Capture range started"  # what nsys prints then


def capture(nsys: str, output: Path, graph_trace: str, program: Sequence[str]) -> list[str]:
    """Run `program` and all that it starts; the report goes to `output` with REPORT behind it."""
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--trace-fork-before-exec=true",
        f"--cuda-graph-trace={graph_trace}",
        "--capture-range=nvtx",
        f"--nvtx-capture={RANGE}",
        "--capture-range-end=stop",  # the program goes on to its own end
        f"--output={output}",
        *program,
    ]


def export(nsys: str, output: Path) -> list[str]:
    """From the report at `output` + REPORT to `output` + EXPORT."""
    return [
        nsys,
        "export",
        "--type=sqlite",
        f"--output={output.with_name(output.name + EXPORT)}",
        str(output.with_name(output.name + REPORT)),
    ]
