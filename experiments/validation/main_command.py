"""The README's command, alone and beside a neighbour that computes in bursts.

    python -m experiments.validation.main_command [RUNS]    4 by default

A fixed list of 40 runs, 20 of each in turn, of which each call does the next. Each is `bench run --variant
pinned-h2d` with its defaults, timed whole (installation aside), about 90 s. What it says of undisturbed turns
should be the same in both.
"""

from __future__ import annotations

from contextlib import nullcontext
from statistics import fmean, median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.sliced_aa import bursts
from overlap_bench.harness.metrics import definitions

HEADER = [
    "beside",
    "step in turns, ms",
    "change",
    "half-width",
    "verdict",
    "undisturbed",
    "change beside others",
    "scatter of pairs, of boots",
    "TPOT p50, in rounds",
    "outputs equal",
    "wall",
    "SD of a loop",
    "commit",
]
SHOWN = (definitions.SLICED, "tpot_ms_p50")


BESIDE = ("nothing", "bursts")
RUNS = BESIDE * 20


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


def cells(run: dict[str, Any]) -> list[str]:
    turns, sliced = run["metrics"][definitions.SLICED], run["sliced"]
    disturbed = sliced.get("disturbed")
    return [
        run.get("beside", BESIDE[0]),
        f"{turns['before']:.3f}",
        change(turns),
        f"±{half_width(turns):.2%}",
        turns["verdict"],
        f"{sliced['undisturbed'] / sliced['pairs']:.0%}",
        "" if disturbed is None else f"{disturbed:+.1%}",
        scatter(sliced),
        change(run["metrics"]["tpot_ms_p50"]),
        f"{run['outputs']['identical']} of {run['outputs']['compared']}",
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def summary(runs: list[dict[str, Any]]) -> str:
    """Of the runs of one kind: median time and half-width, the widest, and the mean change."""
    turns = [run["metrics"][definitions.SLICED] for run in runs]
    widths, seconds = [half_width(each) for each in turns], median(run["seconds"] for run in runs)
    mean = fmean(each["change"] for each in turns)
    return (
        f"{len(runs)} runs, median {seconds:.0f} s, half-width ±{median(widths):.2%} (widest "
        f"±{max(widths):.2%}), mean change {mean:+.2%}"
    )


def repeat(script: str, description: str | None, *flags: str) -> None:
    """As often as the command line of that script says, with these flags."""
    runs = earlier(script)
    for _ in range(command_line.wanted(script, description, "RUNS", 5)):
        runs.append(measured(*flags))
        told = f"`{' '.join(('bench run --variant pinned-h2d', *flags))}`: {summary(runs)}"
        write_result(script, title=told, header=HEADER, rows=list(map(cells, runs)), data=runs)


def main() -> None:
    runs = earlier(__file__)
    wanted = command_line.wanted(__file__, __doc__, "RUNS", 2 * len(BESIDE))
    for number in range(len(runs), min(len(runs) + wanted, len(RUNS))):
        with bursts(number) if RUNS[number] == "bursts" else nullcontext():
            runs.append(measured() | {"beside": RUNS[number]})
        kinds = {kind: [run for run in runs if run["beside"] == kind] for kind in BESIDE}
        told = "; ".join(f"beside {kind}: {summary(each)}" for kind, each in kinds.items() if each)
        write_result(
            __file__,
            title=f"`bench run --variant pinned-h2d`, {told}",
            header=HEADER,
            rows=list(map(cells, runs)),
            data=runs,
        )


if __name__ == "__main__":
    main()
