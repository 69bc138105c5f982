"""How much longer a decode step on the device takes behind a pause, in which its core sleeps or counts.

    python -m experiments.validation.steps_behind_pauses    4 minutes

A delay that is planted in a step makes the step longer by more than itself (plants_in_three_minutes). Here
nothing waits for anything: each of PROCESSES fresh processes has a core to itself, and runs a step that fills
the caches, a pause, and a step that is timed, the pauses in an order drawn anew for each cycle. What a pause
costs is the difference to no pause in the same cycle, in the middle of a process's cycles; its interval is of
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

PROCESSES, SECONDS = 8, 25
PAUSES_US = (50, 100, 250, 500, 1000, 2000)


def sleep_for(ns: int) -> None:
    time.sleep(ns / 1e9)


KINDS: dict[str, Callable[[int], object]] = {"awake": compute_for, "asleep": sleep_for}
NONE = ("awake", 0)
PAUSES = [NONE, *((kind, each) for kind in KINDS for each in PAUSES_US)]


def timed(seed: int) -> list[list[int]]:
    """Nanoseconds of the step behind each of PAUSES, cycle by cycle."""
    order = Random(seed)
    cycles = []
    torch.set_num_threads(1)
    with torch.inference_mode():
        module = loaded()
        os.sched_setaffinity(0, {CORE})
        for _ in range(WARM_UP):
            decode(module)
        settle_garbage()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            took = [0] * len(PAUSES)
            for place in order.sample(range(len(PAUSES)), len(PAUSES)):
                kind, us = PAUSES[place]
                decode(module)
                KINDS[kind](us * 1000)
                began = time.perf_counter_ns()
                decode(module)
                took[place] = time.perf_counter_ns() - began
            cycles.append(took)
    return cycles


def of_process(cycles: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What each of PAUSES adds to the step, us, and the step without one."""
    took = np.array(cycles) / NS_PER_US
    without = took[:, PAUSES.index(NONE)]
    return {
        "cycles": len(took),
        "step_us": slices.trimmed(without),
        "more_us": [round(slices.trimmed(each - without), 2) for each in took.T],
    }


def measured(seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(seed)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def added(processes: Sequence[dict[str, Any]], pause: tuple[str, int]) -> Effect:
    """What it adds to a step, us."""
    place = PAUSES.index(pause)
    return effect([0.0] * len(processes), [each["more_us"][place] for each in processes], "difference")


def per_us(processes: Sequence[dict[str, Any]]) -> Effect:
    """What an us more of counting adds to the step behind it, us: the slope over all pauses, awake."""
    places = [place for place, (kind, _) in enumerate(PAUSES) if kind == "awake"]
    lengths = [PAUSES[place][1] for place in places]
    slopes = [np.polyfit(lengths, [each["more_us"][at] for at in places], 1)[0] for each in processes]
    return effect([0.0] * len(slopes), slopes, "difference")


def cell(found: Effect) -> str:
    return f"{found.delta:+.0f} [{found.low:+.0f}, {found.high:+.0f}]"


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].isdigit():  # a process of `measured`
        print(json.dumps(of_process(timed(int(sys.argv[1])))))
        return
    command_line.chosen(__file__, __doc__, ())
    loop = loop_sd()
    processes = [measured(seed) for seed in range(PROCESSES)]
    slope = per_us(processes)
    step_ms = np.mean([each["step_us"] for each in processes]) / 1e3
    write_result(
        __file__,
        title=f"What a pause adds to the decode step behind it, of {step_ms:.2f} ms: {slope.delta:.3f} us "
        f"[{slope.low:.3f}, {slope.high:.3f}] for each us, awake; {PROCESSES} processes, SD of a loop "
        f"{loop:.1%}",
        header=["pause", *(f"{kind}, us" for kind in KINDS)],
        rows=[
            [f"{each / 1e3:g} ms", *(cell(added(processes, (kind, each))) for kind in KINDS)]
            for each in PAUSES_US
        ],
        data={"pauses": PAUSES, "loop_sd": loop, "processes": processes},
    )


if __name__ == "__main__":
    main()
