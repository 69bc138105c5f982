"""Whether intervals hold a delay of 2% of a step where the device's own part of the step can't grow with it.

    python -m experiments.validation.plants_paced [RUNS]    6 by default, 8 minutes

A fixed list of 30 runs of `bench aa --pace 10ms`, of which each call does the next: the cells of sliced_aa in
which a delay is not hidden, five times each, in turn. Computed by a core, a step gets longer by more than its
delay (steps_behind_pauses), so that nobody knows what an interval should hold; with a pace it doesn't.
Each run has a seed of its own, its place in the list behind those of plants_in_three_minutes.
"""

from __future__ import annotations

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from experiments.validation import plants_in_three_minutes
from experiments.validation.sliced_aa import HEADER, PLANTED, SHARE, listed, measured, rows

CELLS = [cell for cell in PLANTED if not cell.hides]
RUNS = CELLS * 5
BLOCKS, PACE = "6", "10ms"
FIRST_SEED = len(listed()) + len(plants_in_three_minutes.RUNS)


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", len(CELLS))
    runs = earlier(__file__)
    for number in range(len(runs), min(len(runs) + wanted, len(RUNS))):
        runs.append(measured(RUNS[number], FIRST_SEED + number, BLOCKS, "--pace", PACE))
        write_result(
            __file__,
            title=f"{SHARE} of a step planted, on a device whose step takes {PACE}: {len(runs)} of "
            f"{len(RUNS)} runs, 95% intervals",
            header=HEADER,
            rows=rows(runs),
            data=runs,
        )


if __name__ == "__main__":
    main()
