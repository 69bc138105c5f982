"""Whether 24 blocks, 126 to 204 s, find a delay of 2% of a step where 12 did not always.

    python -m experiments.validation.plants_in_three_minutes [RUNS]    6 by default, 20 minutes

A fixed list of 60 runs of `bench aa`, of which each call does the next: 20 of each of the three cells of
sliced_aa in which 12 blocks found it in fewer than 18 of 20, in turn. They have twice as many blocks, and are
the same otherwise. Each run has a seed of its own, its place in the list behind those of sliced_aa.
"""

from __future__ import annotations

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from experiments.validation.sliced_aa import HEADER, SHARE, Cell, listed, measured, rows

CELLS = (
    Cell("serial", "device", "nothing"),
    Cell("serial", "host", "bursts"),
    Cell("serial", "device", "bursts"),
)
RUNS = CELLS * 20
BLOCKS = "24"


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", 2 * len(CELLS))
    runs = earlier(__file__)
    for number in range(len(runs), min(len(runs) + wanted, len(RUNS))):
        runs.append(measured(RUNS[number], len(listed()) + number, BLOCKS))
        write_result(
            __file__,
            title=f"{SHARE} of a step planted, in {BLOCKS} blocks of turns: {len(runs)} of {len(RUNS)} runs, "
            "95% intervals",
            header=HEADER,
            rows=rows(runs),
            data=runs,
        )


if __name__ == "__main__":
    main()
