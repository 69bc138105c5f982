"""The README's command, again and again.

    python -m experiments.validation.main_command [RUNS]    5 by default

Each is `bench run --variant pinned-h2d` with its defaults, timed whole (installation aside), one to two
minutes. Later calls add to the runs of earlier ones.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from overlap_bench.harness.metrics import definitions

HEADER = [
    "step in turns, ms",
    "change",
    "half-width",
    "verdict",
    "scatter of pairs, of boots",
    "TPOT p50, in rounds",
    "outputs equal",
    "wall",
    "SD of a loop",
    "commit",
]
SHOWN = (definitions.SLICED, "tpot_ms_p50")


def measured(*flags: str) -> dict[str, Any]:
    run = bench("run", "--variant", "pinned-h2d", *flags)
    comparison = run["comparison"]
    return {
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "sliced": comparison["sliced"],
        "metrics": {name: comparison["metrics"][name] for name in SHOWN},
        "outputs": comparison["outputs"],
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def half_width(row: dict[str, Any]) -> float:
    return float(row["ci_high"] - row["ci_low"]) / 2


def scatter(sliced: dict[str, Any]) -> str:
    """What a block's change scatters by: for its pairs, and for its boots."""
    return f"{sliced['within']:.2%}, {sliced['between']:.2%}"


def change(row: dict[str, Any]) -> str:
    return f"{row['change']:+.2%} [{row['ci_low']:+.2%}, {row['ci_high']:+.2%}]"


def repeat(script: str, description: str | None, *flags: str) -> None:
    """As often as the command line of that script says, with these flags."""
    runs = earlier(script)
    for _ in range(command_line.wanted(script, description, "RUNS", 5)):
        runs.append(measured(*flags))
        turns, tpot = (median(half_width(run["metrics"][name]) for run in runs) for name in SHOWN)
        seconds = median(run["seconds"] for run in runs)
        write_result(
            script,
            title=f"`{' '.join(('bench run --variant pinned-h2d', *flags))}`, {len(runs)} times: median "
            f"{seconds:.0f} s, half-width ±{turns:.2%} for the step in turns, ±{tpot:.2%} for TPOT p50 in "
            "rounds",
            header=HEADER,
            rows=[
                [
                    f"{run['metrics'][definitions.SLICED]['before']:.3f}",
                    change(run["metrics"][definitions.SLICED]),
                    f"±{half_width(run['metrics'][definitions.SLICED]):.2%}",
                    run["metrics"][definitions.SLICED]["verdict"],
                    scatter(run["sliced"]),
                    change(run["metrics"]["tpot_ms_p50"]),
                    f"{run['outputs']['identical']} of {run['outputs']['compared']}",
                    f"{run['seconds']:.0f} s",
                    f"{run['loop_sd']:.1%}",
                    run["commit"],
                ]
                for run in runs
            ],
            data=runs,
        )


if __name__ == "__main__":
    repeat(__file__, __doc__)
