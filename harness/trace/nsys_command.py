"""The commands of Nsight Systems: capture one arm's window, and export what was captured to SQLite.

The capture range is the NVTX range that the engine's window is inside of: that works with and without CUDA,
and needs no call into it. Nothing is sampled, so that what is traced is disturbed as little as can be.
`graph` gives one row per replay of a CUDA graph, `node` one per kernel in it, at up to 2.4 times the time per
token: look at kernels with it, never at times.

Tried with Nsight Systems 2022.4.2 on the emulated device (no GPU, no driver):

    options        all of them are known to 2022.4. Later versions take a suffix to graph and node
                   (`--cuda-graph-trace=graph:host-and-device`), which is not used here
    the range      registered strings are found without NSYS_NVTX_PROFILER_REGISTER_ONLY=0. This version does
                   not answer nvtx whether it listens to a domain: engines/tracing.py makes it regardless
    the end        `stop` stops the collection and leaves the program alone. The default, `stop-shutdown`,
                   sends it the signal of --kill (SIGTERM) in the middle of its round
    children       those that exec are followed anyway; --trace-fork-before-exec is for engines whose workers
                   only fork, and counts as risky in its own --help
    no GPU         `graph` is turned into `node` with a warning; there are no CUPTI_ tables at all
    no report      the status is 0 even where the importer (host-linux-x64, its libssh) is missing or the
                   capture range never began: whether a report is there has to be looked at
    killed         the program runs below an agent of its own session, which survives `nsys`; a few files
                   injection_config_* stay in /tmp, whatever TMPDIR says
    cost           about 0.6 to 0.9 us a range on a busy 2-core machine, inside and outside the capture range
    in the report  the environment and the list of all processes of the machine: look before passing one on
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.tracing import WINDOW, WINDOW_DOMAIN

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
