"""The scheduler and the block pool under a long load, on a device that only checks them.

    python -m experiments.validation.scheduler_soak

100,000 requests of mixed lengths, whose prompts begin alike, with EOS, stops and cancellations, through a
pool that is far too small for them, with the prefix cache on; one step ahead and none; prompts whole and in
chunks, one token a step, eight, or as many drafts as are right. The stub device
computes each token from what lies in the KV slots that the step names, so a wrong block is a wrong token.
The books are checked 1,000 times on the way, and resident memory is looked at ten times: it must not grow.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

import psutil

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.simulation import Simulation, soak

REQUESTS = 100_000
LAPS = 10
CHECKS = 100  # of a lap
CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (0, "full", {}),
    (1, "full", {}),
    (1, "dirty-rows", {}),
    (1, "full", {"chunk_tokens": 16}),
    (1, "dirty-rows", {"chunk_tokens": 16, "steps": 8}),
    (1, "full", {"steps": 8}),
    (0, "full", {"accept": "host"}),
    (1, "dirty-rows", {"accept": "device"}),
)


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    rows, data, process = [], {}, psutil.Process()
    for ahead, tables, today in CASES:
        simulation = Simulation(
            batch=16,
            blocks=40,
            context=64,
            prefill_batch=8,
            prefill_tokens=64,
            ahead=ahead,
            prefix_cache=True,
            tables=tables,
            **today,
        )
        began, kib = perf_counter(), []
        for lap in range(LAPS):
            soak(simulation, REQUESTS // LAPS, seed=lap, checks=CHECKS)
            gc.collect()
            kib.append(process.memory_info().rss >> 10)
        assert simulation.over.total() == REQUESTS
        assert simulation.pool.free == simulation.blocks - 1
        rows.append(
            [
                "overlap" if ahead else "serial",
                tables,
                ", ".join(f"{name} {each}" for name, each in today.items()) or "–",
                str(simulation.over.total()),
                ", ".join(f"{count} {reason}" for reason, count in sorted(simulation.over.items())),
                str(simulation.preempted),
                str(simulation.cached),
                f"{kib[0]} → {kib[-1]}",
                f"{perf_counter() - began:.0f} s",
            ]
        )
        data[", ".join(rows[-1][:3])] = {"kib": kib}
    write_result(
        __file__,
        title="Scheduler and block pool under a long load: every token is right, no block leaks",
        header=[
            "loop",
            "tables",
            "besides",
            "requests",
            "ended by",
            "preempted",
            "cached tokens",
            "resident KiB after 10%, 100%",
            "wall",
        ],
        rows=rows,
        data=data,
    )


if __name__ == "__main__":
    main()
