"""The README's command, alone and beside a neighbour that computes in bursts.

    python -m experiments.validation.main_command [RUNS]    4 by default

A fixed list of 40 runs, 20 of each in turn, of which each call does the next. Each is `bench run --variant
pinned-h2d` with its defaults, timed whole (installation aside), about 90 s. What it says of undisturbed turns
should be the same in both. Each arm's turns are then paired with its own next ones: arms that are equal, and
as disturbed as the run was. DRAWN runs of six blocks are drawn from these, and judged as a run is.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from experiments.common import command_line
from experiments.common.record import Rows, write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.sliced_aa import bursts
from overlap_bench.harness.analysis.decision import detected
from overlap_bench.harness.metrics import definitions, slices
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store import tables

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
DRAWN = 10_000


def measured(*flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = bench("run", "--variant", "pinned-h2d", *flags, out=Path(folder))
        (stored,) = Path(folder).glob("*/manifest.json")
        equal = own_pairs(stored.parent)
    comparison = run["comparison"]
    return {
        "equal": equal,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "sliced": comparison["interleaved"],
        "metrics": {name: comparison["metrics"][name] for name in SHOWN},
        "outputs": comparison["outputs"],
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def own_pairs(run: Path) -> list[dict[str, float]]:
    """What a run would say of equal arms, one of each block and arm: its turns are paired with its own next
    ones, in alternating order. The log of the change that decides, and the share of undisturbed pairs."""
    found = []
    for number in tables.finished_blocks(run):
        frame = tables.read_table(run, number, "slices")
        for _, turns in slices.decode_slices(frame).groupby("arm"):
            pairs = slices.pair(*sides(turns))
            change = slices.deciding(pairs).eval("interval_ns_after / interval_ns_before")
            calm = len(slices.undisturbed(pairs)) / len(pairs)
            found.append({"log": slices.trimmed(np.log(change)), "calm": calm})
    return found


def sides(turns: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One arm's turns as those of two, which take turns in the order that runs have: the first of two first,
    then the second."""
    ordered = turns.sort_values(["round", "turn"])
    place = ordered.groupby("round").cumcount().to_numpy()
    first = np.isin(place % 4, (0, 3))
    told = ordered.assign(turn=place // 2, first_step=0, tokens=0)  # these differ by their place alone
    return told[first], told[~first]


def called_different(blocks: list[dict[str, float]], random: np.random.Generator) -> tuple[int, int]:
    """How many of DRAWN runs of six blocks are decided at all, and how many find a change."""
    drawn = random.choice(len(blocks), (DRAWN, 6))
    swapped = random.choice((-1, 1), (DRAWN, 6))
    calm, logs = (np.array([each[name] for each in blocks]) for name in ("calm", "log"))
    decided = calm[drawn].min(axis=1) >= slices.ENOUGH
    changes = np.exp((logs[drawn] * swapped)[decided])
    wrong = sum(detected(paired.effect([1.0] * 6, each.tolist())) for each in changes)
    return int(decided.sum()), wrong


def replayed(runs: list[dict[str, Any]]) -> Rows:
    """What is found where nothing differs, by what the runs were beside."""
    table = [["turns of", "blocks", "runs drawn", "decided", "called different", "95% interval"]]
    for kind in BESIDE:
        blocks = [each for run in runs if run["beside"] == kind for each in run.get("equal", ())]
        if not blocks:
            continue
        decided, wrong = called_different(blocks, np.random.default_rng(0))
        found = stats.binomtest(wrong, max(1, decided)).proportion_ci()
        share = f"{wrong / max(1, decided):.2%}"
        shown = [
            f"{len(blocks)}",
            f"{DRAWN:,}",
            f"{decided:,}",
            share,
            f"{found.low:.2%} to {found.high:.2%}",
        ]
        table.append([f"runs beside {kind}", *shown])
    return table


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
    """Median time and half-width of the runs of one kind, the widest, and the mean change."""
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
            sections={"Where nothing differs": replayed(runs)},
            data=runs,
        )


if __name__ == "__main__":
    main()
