"""What a small copy between host and card really does, on CUDA only.

    python -m experiments.gpu.pageable_copies [--out FOLDER]

Two questions, for pageable and pinned memory in both directions and by size, the call being the engine's own
(Tensor.copy_ with non_blocking=True on a stream that is not the default one):

- what the call costs the host while the stream is idle;
- whether it waits for the device. Work of 2 ms is put on the stream first (torch.cuda._sleep), then the copy;
  a call that comes back while that work still runs has not waited. The host's time in the call says it, and
  so does an event behind that work, asked at once when the call is back.

Then what the other calls of a step cost: event record, query, synchronize on one that has happened,
wait_event, and the replay of a captured graph of one and of a hundred empty-handed kernels.

CUDA's documentation (API synchronization behavior) allows more than it promises here: pageable to device
memory "might be synchronous", the stream synchronized first, up to 64 KB staged and returned before the copy
is done. The emulated device's --staging copy or sync is one of these; this says which.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from overlap_bench.engines.overlap.plant import SpinKernel

SIZES = (64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, (64 << 10) + 64, 256 << 10, 1 << 20, 16 << 20)
REPEATS = 200
BUSY_MS = 2.0
KERNELS = (1, 100)


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: nothing can be learnt of pageable copies")
    stream = torch.cuda.Stream()
    spin = SpinKernel()
    rows, data = [], []
    with torch.cuda.stream(stream):
        spin(0)  # the first call counts the card's cycles per ns, until the clock rises no more
        for direction in ("to the device", "to the host"):
            for kind in ("pageable", "pinned"):
                for size in SIZES:
                    host = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
                    card = torch.zeros(size, dtype=torch.uint8, device="cuda")
                    target, source = (card, host) if direction == "to the device" else (host, card)
                    found = measured(stream, spin, target, source)
                    data.append({"direction": direction, "memory": kind, "bytes": size, **found})
                    rows.append(
                        [
                            direction,
                            kind,
                            f"{size:,}",
                            f"{found['idle_us_p50']:.1f} / {found['idle_us_p99']:.1f}",
                            f"{found['busy_us_p50']:.1f} / {found['busy_us_p99']:.1f}",
                            f"{found['waited']:.0%}",
                        ]
                    )
        calls = costs(stream)
    write_result(
        __file__,
        title=f"Small copies on {torch.cuda.get_device_name()}: host time of the call in us, p50 / p99 of "
        f"{REPEATS}, on an idle stream and behind {BUSY_MS:g} ms of work",
        header=["copy", "memory", "bytes", "idle", "behind work", "waited for the work"],
        rows=[
            *rows,
            *([name, "", "", f"{p50:.1f} / {p99:.1f}", "", ""] for name, (p50, p99) in calls.items()),
        ],
        data={"copies": data, "calls": calls, "torch": torch.__version__, "cuda": torch.version.cuda},
        folder=given.out,
    )


def measured(
    stream: torch.cuda.Stream, spin: SpinKernel, target: torch.Tensor, source: torch.Tensor
) -> dict[str, float]:
    idle, busy, waited = [], [], 0
    for _ in range(REPEATS):
        stream.synchronize()
        idle.append(timed(lambda: target.copy_(source, non_blocking=True)))
    for _ in range(REPEATS):
        stream.synchronize()
        spin(round(BUSY_MS * 1e6))
        worked = stream.record_event()
        busy.append(timed(lambda: target.copy_(source, non_blocking=True)))
        waited += worked.query()
    stream.synchronize()
    return {
        **{f"idle_us_p{level}": float(np.percentile(idle, level)) for level in (50, 99)},
        **{f"busy_us_p{level}": float(np.percentile(busy, level)) for level in (50, 99)},
        "waited": waited / REPEATS,
    }


def timed(call: Callable[[], Any]) -> float:
    """Microseconds."""
    began = perf_counter_ns()
    call()
    return (perf_counter_ns() - began) / 1e3


def costs(stream: torch.cuda.Stream) -> dict[str, tuple[float, float]]:
    """p50 and p99 of the other calls, us; the last ones are whole round trips."""
    event = torch.cuda.Event()
    other = torch.cuda.Stream()
    happened = stream.record_event()
    stream.synchronize()
    calls: dict[str, Callable[[], Any]] = {
        "event record": lambda: event.record(stream),
        "event query": happened.query,
        "event synchronize, happened": happened.synchronize,
        "stream wait_event": lambda: other.wait_event(happened),
    }
    kept = []  # a graph writes to it for as long as it is replayed
    for count in KERNELS:
        graph, cell = captured(stream, count)
        kept.append(cell)

        def round_trip(graph: torch.cuda.CUDAGraph = graph) -> None:
            graph.replay()
            stream.synchronize()

        calls[f"replay of {count} kernels, the call"] = graph.replay
        calls[f"replay of {count} kernels and synchronize"] = round_trip
    found = {}
    for name, call in calls.items():
        samples = []
        for _ in range(REPEATS):
            samples.append(timed(call))
            stream.synchronize()
        found[name] = (float(np.percentile(samples, 50)), float(np.percentile(samples, 99)))
    return found


def captured(stream: torch.cuda.Stream, kernels: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of so many kernels, and the memory that it writes to."""
    graph, cell = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(kernels):
            cell.add_(1)
    return graph, cell


if __name__ == "__main__":
    main()
