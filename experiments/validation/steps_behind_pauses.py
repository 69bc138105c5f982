"""How much longer a decode step on the device takes behind a pause, in which its core sleeps or counts.

    python -m experiments.validation.steps_behind_pauses    5 minutes

A delay that is planted in a step makes the step longer by more than itself (plants_in_three_minutes). Here
nothing waits for anything: each of PROCESSES fresh processes has a core to itself, and runs two steps that
fill the caches, a pause, and a step that is timed, the pauses in an order drawn anew for each cycle. What a
pause costs is the difference to no pause in the same cycle, in the middle of a process's cycles; its interval
is of processes. Beside the step are a product of matrices of 16 KiB and one that reads 9 MiB: what is lost in
a pause is in the caches where the second gets slower and the first does not.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from engines.devices.loading import settle_garbage
from engines.overlap.plant import compute_for
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import loop_sd
from experiments.validation.equal_processes import CORE, WARM_UP, decode, loaded
from harness.metrics import slices
from harness.metrics.definitions import NS_PER_US
from harness.stats.paired import Effect, effect

PROCESSES, SECONDS = 8, 30
PAUSES_US = (50, 100, 250, 500, 1000, 2000)


def sleep_for(ns: int) -> None:
    time.sleep(ns / 1e9)


PAUSING: dict[str, Callable[[int], object]] = {"awake": compute_for, "asleep": sleep_for}
STEP, SMALL, LARGE = "a decode step", "16 KiB", "9 MiB"
SERIES = [(STEP, "awake"), (STEP, "asleep"), (SMALL, "awake"), (LARGE, "awake")]
PAUSES = [(*each, us) for each in SERIES for us in (0, *PAUSES_US)]


def programs() -> dict[str, Callable[[], object]]:
    module = loaded()
    small, row, large = torch.randn(64, 64), torch.randn(1536), torch.randn(1536, 1536)
    product = torch.empty(64, 64)

    def multiply_small() -> None:
        for _ in range(100):
            torch.mm(small, small, out=product)

    return {STEP: lambda: decode(module), SMALL: multiply_small, LARGE: lambda: torch.mv(large, row)}


def timed(seed: int) -> list[list[int]]:
    """Nanoseconds of what comes behind each of PAUSES, cycle by cycle."""
    order = Random(seed)
    cycles = []
    torch.set_num_threads(1)
    with torch.inference_mode():
        runs = programs()
        os.sched_setaffinity(0, {CORE})
        for run in runs.values():
            for _ in range(WARM_UP):
                run()
        settle_garbage()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            took = [0] * len(PAUSES)
            for place in order.sample(range(len(PAUSES)), len(PAUSES)):
                name, kind, us = PAUSES[place]
                run = runs[name]
                run()
                run()
                PAUSING[kind](us * 1000)
                began = time.perf_counter_ns()
                run()
                took[place] = time.perf_counter_ns() - began
            cycles.append(took)
    return cycles


def of_process(cycles: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What each of PAUSES adds, us, and what each takes without one behind being awake."""
    took = np.array(cycles) / NS_PER_US
    without = {name: took[:, PAUSES.index((name, "awake", 0))] for name, _ in SERIES}
    return {
        "cycles": len(took),
        "without_us": {name: slices.trimmed(each) for name, each in without.items()},
        "more_us": [
            round(slices.trimmed(each - without[name]), 2)
            for (name, _, _), each in zip(PAUSES, took.T, strict=True)
        ],
    }


def measured(seed: int) -> dict[str, Any]:
    return of_process(timed(seed))


def added(processes: Sequence[dict[str, Any]], pause: tuple[str, str, int]) -> Effect:
    """What it adds, us."""
    place = PAUSES.index(pause)
    return effect([0.0] * len(processes), [each["more_us"][place] for each in processes], "difference")


def per_us(processes: Sequence[dict[str, Any]], series: tuple[str, str]) -> Effect:
    """What an us more of a pause adds to what comes behind it, us: the slope over PAUSES_US."""
    places = [PAUSES.index((*series, us)) for us in PAUSES_US]
    slopes = [np.polyfit(PAUSES_US, [each["more_us"][at] for at in places], 1)[0] for each in processes]
    return effect([0.0] * len(slopes), slopes, "difference")


def cell(found: Effect, digits: int = 0) -> str:
    return f"{found.delta:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def headed(processes: Sequence[dict[str, Any]], name: str, kind: str) -> str:
    took = np.mean([each["without_us"][name] for each in processes])
    return f"{name} of {took / 1e3:.2f} ms, {kind}"


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    loop = loop_sd()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        processes = fresh.map(measured, range(PROCESSES), chunksize=1)
    write_result(
        __file__,
        title=f"What a pause adds to what a core computes behind it, us; {PROCESSES} processes, SD of a loop "
        f"{loop:.1%}, 95% intervals",
        header=["pause", *(headed(processes, *each) for each in SERIES)],
        rows=[
            *(
                [f"{us / 1e3:g} ms", *(cell(added(processes, (*each, us))) for each in SERIES)]
                for us in PAUSES_US
            ),
            ["for each us", *(cell(per_us(processes, each), 3) for each in SERIES)],
        ],
        data={"pauses": PAUSES, "loop_sd": loop, "processes": processes},
    )


if __name__ == "__main__":
    main()
