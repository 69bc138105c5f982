"""The README's command, again and again: `python -m experiments.main_command [RUNS]`, 5 by default.

Each is `bench run --variant pinned-h2d` with its defaults, timed whole (installation aside), about 90 s.
Later calls add to the runs of earlier ones.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.record import write_result
from experiments.repeated import bench, earlier, wanted
from harness import metrics

NAME = "main_command"
HEADER = ["TPOT p50, ms", "change", "verdict", "host's part", "verdict", "outputs equal", "wall", "commit"]
SHOWN = ("tpot_ms_p50", metrics.SAME_DEVICE)


def measured() -> dict[str, Any]:
    run = bench("run", "--variant", "pinned-h2d")
    comparison = run["comparison"]
    return {
        **{name: run[name] for name in ("code", "seconds", "commit")},
        "metrics": {name: comparison["metrics"][name] for name in SHOWN},
        "outputs": comparison["outputs"],
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def half_width(row: dict[str, Any]) -> float:
    return float(row["ci_high"] - row["ci_low"]) / 2


def cells(row: dict[str, Any]) -> list[str]:
    return [f"{row['change']:+.2%} [{row['ci_low']:+.2%}, {row['ci_high']:+.2%}]", row["verdict"]]


def main() -> None:
    runs = earlier(NAME)
    for _ in range(wanted(5)):
        runs.append(measured())
        tpot, host = (median(half_width(run["metrics"][name]) for run in runs) for name in SHOWN)
        seconds = median(run["seconds"] for run in runs)
        write_result(
            NAME,
            title=f"`bench run --variant pinned-h2d`, {len(runs)} times: median {seconds:.0f} s, half-width "
            f"±{tpot:.2%} for TPOT p50, ±{host:.2%} for the host's part of the step",
            header=HEADER,
            rows=[
                [
                    f"{run['metrics']['tpot_ms_p50']['before']:.3f}",
                    *(cell for name in SHOWN for cell in cells(run["metrics"][name])),
                    f"{run['outputs']['identical']} of {run['outputs']['compared']}",
                    f"{run['seconds']:.0f} s",
                    run["commit"],
                ]
                for run in runs
            ],
            data=runs,
        )


if __name__ == "__main__":
    main()
