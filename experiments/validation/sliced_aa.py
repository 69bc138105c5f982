"""Equal arms by turns, and arms between which a delay of 2% of a step is planted.

    python -m experiments.validation.sliced_aa [SETS]    1 by default

A set is six runs of `bench aa`: a serial loop and one that overlaps its steps, each as it is, with a delay
at the host and with one on the device. Each has a seed of its own. Later calls add to the runs of earlier
ones. A delay at the host of a loop that overlaps is hidden, so no change is expected of it there.
"""

from __future__ import annotations

from itertools import count, islice
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change, half_width, scatter
from harness.analysis import mechanism
from harness.analysis.result import Comparison, from_plain
from harness.metrics import definitions

LOOPS = {
    "serial": ("--variant", "pinned-h2d"),
    "overlapped": ("--variant", "overlap", "--set", "schedule=overlap"),
}
PLANTS = ("none", "host", "device")
SHARE = "2%"
HEADER = [
    "loop",
    "planted at",
    "achieved",
    "change",
    "half-width",
    "verdict",
    "scatter of pairs, of boots",
    "TPOT p50",
    "wall",
    "SD of a loop",
    "commit",
]


def measured(loop: str, place: str, seed: int) -> dict[str, Any]:
    planted = () if place == "none" else ("--plant", SHARE, "--plant-at", place)
    run = bench("aa", *LOOPS[loop], *planted, "--seed", str(seed))
    comparison = run["comparison"]
    achieved = mechanism.planted_share(from_plain(comparison, Comparison)) if planted else None
    return {
        "loop": loop,
        "place": place,
        "achieved": achieved,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "sliced": comparison["sliced"],
        "metrics": {name: comparison["metrics"][name] for name in (definitions.SLICED, "tpot_ms_p50")},
    }


def row(run: dict[str, Any]) -> list[str]:
    turns = run["metrics"][definitions.SLICED]
    return [
        run["loop"],
        run["place"],
        "" if run["achieved"] is None else f"{run['achieved']:+.2%}",
        change(turns),
        f"±{half_width(turns):.2%}",
        turns["verdict"],
        scatter(run["sliced"]),
        change(run["metrics"]["tpot_ms_p50"]),
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "SETS", 1) * len(LOOPS) * len(PLANTS)
    runs = earlier(__file__)
    cells = [(loop, place) for loop in LOOPS for place in PLANTS]
    for number in islice(count(len(runs)), wanted):
        runs.append(measured(*cells[number % len(cells)], seed=number))
        write_result(
            __file__,
            title="Equal arms by turns, with and without a planted delay; 95% intervals",
            header=HEADER,
            rows=[row(each) for each in runs],
            data=runs,
        )


if __name__ == "__main__":
    main()
