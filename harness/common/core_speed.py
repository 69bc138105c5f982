"""How fast a core is now: one small loop, timed.

Other work on the same physical core can make all work take half as long again, and in a virtual machine
no counter shows it: nothing was stolen. Clocks that move and heat show here too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

ADDITIONS = 4000  # some 150 us
TRIES = 3  # the fastest counts: the others may have been interrupted
MOST_CORES = 8  # that are looked at, evenly spread
STEADY = 1.15  # slow over fast (see `spread`), below which a speed is steady


def cores() -> list[int]:
    """The cores to look at, of those this process may run on."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[:: -(-len(usable) // MOST_CORES)]


def loop_us() -> float:
    began = time.perf_counter_ns()
    total = 0
    for each in range(ADDITIONS):
        total += each
    return (time.perf_counter_ns() - began) / 1e3


def mean_loop_us() -> float:
    """Over the cores: about half a millisecond on each. The calling thread is moved, and moved back."""
    usable = os.sched_getaffinity(0)
    found = []
    try:
        for core in cores():
            os.sched_setaffinity(0, {core})
            found.append(min(loop_us() for _ in range(TRIES)))
    finally:
        os.sched_setaffinity(0, usable)
    return sum(found) / len(found)


def spread(loops_us: Sequence[float]) -> tuple[float, float]:
    """Fast and slow: the fastest and the slowest, once a tenth is cut off at either end."""
    ranked = sorted(loops_us)
    tenth = len(ranked) // 10
    return ranked[tenth], ranked[-1 - tenth]


def main() -> None:
    """`core_speed.py CORE SECONDS` keeps that core busy so long, and prints the time of each loop in us."""
    core, seconds = int(sys.argv[1]), float(sys.argv[2])
    os.sched_setaffinity(0, {core})
    end = time.perf_counter() + seconds
    found = []
    while time.perf_counter() < end:
        found.append(loop_us())
    print(*(f"{each:.1f}" for each in found))


if __name__ == "__main__":
    main()
