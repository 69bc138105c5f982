"""An arm against itself on this machine's device.

    python -m experiments.validation.real_aa [RUNS]    20 by default

Each run is `bench aa` of 8 blocks with another seed, about 135 s. Later calls add to the runs of earlier
ones. Of 20 runs, a method that holds 5% calls one a change on average, and more than three in 1.6% of cases.
Drawn as a funnel beside the table.
"""

from __future__ import annotations

from typing import Any

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from experiments.common.repeated_runs import CELLS, bench, cells, earlier, kept
from overlap_bench.harness.analysis.plain import from_plain
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.report.figures.changes import funnel_of

RUN = (
    *("aa", "--variant", "overlap", "--set", "schedule=overlap"),
    *("--trials", "8", "--primary", "tpot_ms_p50"),
)


def main() -> None:
    runs = earlier(__file__)
    for _ in range(command_line.wanted(__file__, __doc__, "RUNS", 20)):
        run = bench(*RUN, "--seed", str(len(runs)))
        runs.append({**kept(run), "comparison": primary_alone(run["comparison"])})
        alarms = sum(run["verdict"] not in ("same", "undecided") for run in runs)
        write_result(
            __file__,
            title=f"An arm against itself, 8 blocks: {alarms} of {len(runs)} called a change",
            header=["seed", *CELLS],
            rows=[[str(seed), *cells(run)] for seed, run in enumerate(runs)],
            data=runs,
        )
        funnel_of([from_plain(run["comparison"], Comparison) for run in runs]).savefig(
            FOLDER / "real_aa.png", dpi=150
        )


def primary_alone(comparison: dict[str, Any]) -> dict[str, Any]:
    """What the funnel draws of a comparison."""
    named = ("variant", "before", "after", "confidence", "blocks", "primary")
    primary = comparison["primary"]
    return {name: comparison[name] for name in named} | {"metrics": {primary: comparison["metrics"][primary]}}


if __name__ == "__main__":
    main()
