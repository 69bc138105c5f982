"""How well a paced device keeps its pace, what its waiting costs, and how busy it is kept.

    python -m experiments.validation.paced_device

micro-gpt2 at a pace of 10 ms, overlapped, closed batch of 1, 16 and 64, 128 tokens each; on the machine as it
is, and beside a process that computes all the time and may run on any core, the device's own included. Three
boots of each, in turn. The first and last eight steps of a round are left out. CPU is the device process's,
computing included. What waiting alone takes is measured with programs that have nothing to compute.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.validation.device_busy import EDGE, busy, serve
from overlap_bench.engines import api
from overlap_bench.engines.devices import open_device
from overlap_bench.engines.devices.base import ModuleSpec
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.engine import OverlapEngine
from overlap_bench.engines.pace import Size
from tests.support.in_process_engine import Collected

PACE_MS = 10.0
BATCHES = (1, 16, 64)
BOOTS = 3
WAITS = 500
SETTINGS = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}


class Nothing:
    """A module with a program that a pace is all there is of."""

    def __init__(self) -> None:
        self.root = torch.nn.Identity()
        self.buffers = {"a": torch.zeros(1)}
        self.programs: dict[str, Callable[..., None]] = {"nothing": lambda: None}
        self.facts: dict[str, Any] = {}

    def sizes(self, program: str, *arguments: int) -> list[Size]:
        return [Size("decode", 1, 1, 0)]


def build(device: torch.device) -> Nothing:
    return Nothing()


def used(pid: int | None) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def waiting() -> float:
    """The share of a core that a device process takes while it waits for the ends of programs."""
    device = open_device("emulated", pace=f"{PACE_MS:g}ms")
    try:
        device.load(ModuleSpec("experiments.validation.paced_device:build", {}))
        device.capture("nothing")
        before = used(device.pid)
        for step in range(WAITS):
            device.launch("nothing", stream=device.stream("forward"), step=step)
        device.drain()
        return (used(device.pid) - before) / (WAITS * PACE_MS / 1e3)
    finally:
        device.close()


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


PLACES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "alone": nullcontext,
    "beside a process that computes": neighbour,
}


def round_of(pace: str, batch: int) -> tuple[np.ndarray, float, float, dict[str, int]]:
    """One boot's second round: times of decode steps (ms), busy, CPU seconds per step, counters."""
    options = api.EngineOptions(device="emulated", model="micro-gpt2", pace=pace)
    engine, sink = OverlapEngine(options, SPEC.check(SETTINGS)), Collected()
    engine.start(sink)
    try:
        serve(engine, sink, batch)
        before = used(engine._device.pid)
        work = serve(engine, sink, batch)
        cpu = used(engine._device.pid) - before
        counters = dict(engine._device.counters)
    finally:
        engine.stop()
    programs = work[work[:, 0] == 0]
    steps = np.unique(programs[:, 1])
    steady = programs[(programs[:, 1] > steps[EDGE]) & (programs[:, 1] < steps[-EDGE])]
    return (steady[:, 3] - steady[:, 2]) / 1e6, busy(work)[0], cpu / len(steps), counters


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    waited = median(waiting() for _ in range(BOOTS))
    for _ in range(BOOTS):
        for batch in BATCHES:
            for place, beside in PLACES.items():
                with beside():
                    took, share, cpu, counters = round_of(f"{PACE_MS:g}ms", batch)
                found.setdefault(f"batch {batch}, {place}", []).append(
                    {
                        "p50_ms": float(np.median(took)),
                        "mean_ms": float(took.mean()),
                        "p99_ms": float(np.percentile(took, 99)),
                        "busy": share,
                        "cpu": cpu / (PACE_MS / 1e3),
                        "late_us": counters["paced_late_ns"] / counters["paced_programs"] / 1e3,
                        "overran": counters["paced_overruns"] / counters["paced_programs"],
                    }
                )

    def cells(boots: list[dict[str, float]]) -> list[str]:
        middle = {name: median(each[name] for each in boots) for name in boots[0]}
        return [
            f"{middle['p50_ms'] / PACE_MS - 1:+.2%}",
            f"{middle['mean_ms'] / PACE_MS - 1:+.2%}",
            f"+{middle['p99_ms'] - PACE_MS:.2f} ms",
            f"{middle['late_us']:.0f} us",
            f"{middle['overran']:.1%}",
            f"{middle['cpu']:.1%}",
            f"{middle['busy']:.1%}",
        ]

    write_result(
        __file__,
        title=f"A device paced at {PACE_MS:g} ms: its decode steps against the pace; median of {BOOTS} "
        f"boots. To wait alone takes {waited:.1%} of a core",
        header=["", "p50", "mean", "p99", "ends late by", "overran", "CPU", "busy"],
        rows=[[name, *cells(boots)] for name, boots in found.items()],
        data={"waiting": waited, "rounds": found},
    )


if __name__ == "__main__":
    main()
