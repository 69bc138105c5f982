"""What three minutes decide: the README's command, and the variants of the loop and the output.

    python -m experiments.validation.three_minutes [RUNS]    27 by default, 80 minutes

A fixed list of runs of `bench run --max-minutes 3`, of which each call does the next: `pinned-h2d` five
times, and four more variants, each as it is and on a device whose decode step takes 10 ms. The first eleven
had blocks of 16 segments (paced 5) and 3 rounds, the next six 8 and 2. Such a run has 3 and 1 by now, so the
unpaced ones come again, and twice those whose boots scatter most. The last four keep the part of exposed host
time too, which does not scatter from boot to boot (twin_boots).
"""

from __future__ import annotations

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from experiments.validation.sliced_variants import DEVICES, HEADER, measured, row

FLAGS = ("--max-minutes", "3")
RUNS = [
    *[("pinned-h2d", "unpaced")] * 5,
    *(
        (name, each)
        for name in ("overlap", "async-output", "deferred-output", "copy-done")
        for each in DEVICES
    ),
    *[(name, "unpaced") for name in ("overlap", "async-output", "deferred-output", "pinned-h2d")],
    *[(name, "unpaced") for name in ("overlap", "async-output", "deferred-output", "pinned-h2d")],
    *[(name, "unpaced") for name in ("overlap", "async-output")],
    *[(name, device) for device in ("unpaced", "paced, 10 ms") for name in ("overlap", "async-output")],
]


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", len(RUNS))
    runs = earlier(__file__)
    for name, device in RUNS[len(runs) :][:wanted]:
        runs.append(measured(name, device, *FLAGS))
        write_result(
            __file__,
            title=f"What three minutes decide by turns, {len(runs)} of {len(RUNS)} runs; "
            "the same step and TPOT p50 in rounds; 95% intervals",
            header=HEADER,
            rows=[row(each) for each in runs],
            data=runs,
        )


if __name__ == "__main__":
    main()
