"""Equal arms by turns, and arms between which a delay of 2% of a step is planted.

    python -m experiments.validation.sliced_aa [RUNS]    13 by default, 20 minutes

A fixed list of 260 runs of `bench aa`, of which each call does the next. It has 20 sets: the eight cells of a
delay (a serial loop or one that overlaps its steps; planted at the host or on the device; quiet, or beside
one process that computes in bursts) once each, and five runs of equal arms, of both loops in turn. Each run
has a seed of its own, its place in the list. A delay at the host of a loop that overlaps is hidden: what is
left of it is measured, and no truth is known.

A step gets longer by more than its delay, as a core computes more slowly behind a pause
(steps_behind_pauses). Beside bursts there is more: 511 us of host time made a step 666 us longer in one run
of 7 blocks, which was not kept, and in which the delays of the turns themselves were looked at. It seems that
who computes longer on a core that others want waits longer for it the next time. So intervals need not hold
what was planted; the table has the ratio of both. Whether they are as wide as they should be is told by the
other runs of the cell: what those made of their delay, in the middle, is what a run should hold. With a pace
and beside nothing a step grows by what was planted (plants_paced).

Blocks are those of a run that has minutes. A run that is to find a delay has 12 of them, others have 6: three
or four, as many as fit into a minute on a slow day, find 2% in few runs (sliced_aa_1_minute).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from overlap_bench.harness.analysis import mechanism
from overlap_bench.harness.analysis.plain import from_plain
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.metrics import definitions

LOOPS = {
    "serial": ("--variant", "pinned-h2d"),
    "overlapped": ("--variant", "overlap", "--set", "schedule=overlap"),
}
SHARE = "2%"
SHAPE = ("--interleaved-rounds", "3", "--rounds", "1")
FINDS, REST = "12", "6"  # blocks: their change has an SD of 1% here, beside bursts of up to 2%
FEWEST = 3  # others of a cell that say what to expect
SETS, EQUAL = 20, 5  # of a set, so many runs have equal arms
# Busy and idle for 0.1 to 2 s each, in an order of its own.
BURSTS = """
import random, sys, time
dwell = random.Random(int(sys.argv[1]))
while True:
    until = time.monotonic() + dwell.uniform(0.1, 2)
    while time.monotonic() < until:
        pass
    time.sleep(dwell.uniform(0.1, 2))
"""
HEADER = [
    "loop",
    "planted at",
    "beside",
    "runs",
    "called a change",
    "intervals that hold the truth",
    "what the cell's others found",
    "change by what was planted, median",
    "change, median",
    "half-width, median",
    "widest",
    "wall, median",
    "SD of a loop, median",
]


@dataclass(frozen=True, slots=True)
class Cell:
    loop: str
    place: str  # where a delay is planted: nowhere ("none"), at the "host" or on the "device"
    beside: str  # "nothing" or "bursts"

    @property
    def hides(self) -> bool:
        """Whether what is planted takes place while the device computes."""
        return self.loop == "overlapped" and self.place == "host"


PLANTED = [
    Cell(loop, place, beside)
    for beside in ("nothing", "bursts")
    for loop in LOOPS
    for place in ("host", "device")
]
EQUAL_ARMS = [Cell(loop, "none", "nothing") for loop in LOOPS]


def listed() -> list[Cell]:
    """All runs, in their order: what the machine does in one hour meets every cell."""
    cells = []
    for number in range(SETS):
        equal = [EQUAL_ARMS[(number + each) % len(EQUAL_ARMS)] for each in range(EQUAL)]
        cells += [*PLANTED, *equal]
    return cells


@contextmanager
def bursts(seed: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-I", "-c", BURSTS, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def blocks_of(cell: Cell) -> str:
    return FINDS if cell.place != "none" and not cell.hides else REST


def measured(cell: Cell, seed: int, blocks: str, *flags: str) -> dict[str, Any]:
    planted = () if cell.place == "none" else ("--inject-delay", SHARE, "--inject-at", cell.place)
    shape = (*SHAPE, "--trials", blocks)
    with bursts(seed) if cell.beside == "bursts" else nullcontext():
        run = bench("aa", *LOOPS[cell.loop], *planted, *shape, *flags, "--seed", str(seed))
    comparison = run["comparison"]
    achieved = mechanism.planted_share(from_plain(comparison, Comparison)) if planted else None
    turns = comparison["metrics"][definitions.SLICED]
    return {
        **asdict(cell),
        "planted": achieved,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        **{name: comparison["interleaved"][name] for name in ("within", "between")},
        **{name: turns[name] for name in ("before", "change", "ci_low", "ci_high", "verdict")},
    }


def found_by_others(cell: Cell, runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> float:
    """The change that the other runs of a cell let expect of this one."""
    ratios = cell.place != "none" and not cell.hides
    others = [each["change"] / (each["planted"] if ratios else 1.0) for each in runs if each is not run]
    expected: float = median(others) * (run["planted"] if ratios else 1.0)
    return expected


def row(cell: Cell, runs: list[dict[str, Any]]) -> list[str]:
    changed = sum(run["verdict"] in ("faster", "slower") for run in runs)
    known = [] if cell.hides else [(run, 0.0 if cell.place == "none" else run["planted"]) for run in runs]
    holding = sum(run["ci_low"] <= real <= run["ci_high"] for run, real in known)
    comparable = runs if len(runs) > FEWEST else []
    as_others = sum(run["ci_low"] <= found_by_others(cell, runs, run) <= run["ci_high"] for run in comparable)
    half_widths = [(run["ci_high"] - run["ci_low"]) / 2 for run in runs]
    return [
        cell.loop,
        cell.place,
        cell.beside,
        str(len(runs)),
        str(changed),
        f"{holding} of {len(known)}" if known else "",
        f"{as_others} of {len(comparable)}" if comparable else "",
        "" if cell.place == "none" else f"{median(run['change'] / run['planted'] for run in runs):.2f}",
        f"{median(run['change'] for run in runs):+.2%}",
        f"±{median(half_widths):.2%}",
        f"±{max(half_widths):.2%}",
        f"{median(run['seconds'] for run in runs):.0f} s",
        f"{median(run['loop_sd'] for run in runs):.1%}",
    ]


def rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """One for each cell that has runs."""
    of_cell = {
        cell: [run for run in runs if Cell(run["loop"], run["place"], run["beside"]) == cell]
        for cell in (*EQUAL_ARMS, *PLANTED)
    }
    return [row(cell, mine) for cell, mine in of_cell.items() if mine]


def write(runs: list[dict[str, Any]]) -> None:
    write_result(
        __file__,
        title=f"Equal arms by turns, and with {SHARE} of a step planted: {len(runs)} of {len(listed())} "
        "runs, 95% intervals",
        header=HEADER,
        rows=rows(runs),
        data=runs,
    )


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", len(PLANTED) + EQUAL)
    runs = earlier(__file__)
    begun = len(runs)
    for number, cell in enumerate(listed()[begun : begun + wanted], begun):
        runs.append(measured(cell, number, blocks_of(cell)))
        write(runs)


if __name__ == "__main__":
    main()
