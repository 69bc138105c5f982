"""vLLM against itself by turns, and against a build of it whose scheduler takes 2% of a step longer.

    python -m experiments.validation.vllm_turns [RUNS]    2 by default, 12 minutes

BENCH_VLLM names an interpreter that has vLLM (engines/vllm/README.md). A fixed list of 60 runs, of which each
call does the next: 20 times a run of equal arms and one of two builds with vLLM in the host's process, of
three minutes each; then ten times both with its core in a process of its own, of six minutes each. The other
build is the same vLLM with one patched file (experiments/common/vllm_builds.py). How long 2% of a step are is
known from the runs of equal arms before.

Boots are most of a run: three imports of vLLM one after the other, where its core is in a process of its own
and its worker in another, take so long that three minutes have one or two blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from overlap_bench.harness.metrics import definitions
from tests.support.vllm_builds import PLANTED_US, build, interpreter

PLACES = {"off": "in process", "on": "engine core"}  # by vLLM's switch multiprocessing
MINUTES = {"off": 3, "on": 6}
SETS = {"off": 20, "on": 10}
SHARE = 0.02
HEADER = [
    "vLLM",
    "builds",
    "runs",
    "blocks, median",
    "called slower",
    "called faster",
    "intervals that hold the truth",
    "planted, of that run's step, median",
    "change, median",
    "half-width, median",
    "widest",
    "outside of the model runner alone: surely longer",
    "half-width of that, median",
    "wall, median",
]


@dataclass(frozen=True, slots=True)
class Cell:
    apart: str  # "off" or "on"
    planted: bool


CELLS = [Cell(apart, planted) for apart in PLACES for planted in (False, True)]
LISTED = [
    Cell(apart, planted) for apart, sets in SETS.items() for _ in range(sets) for planted in (False, True)
]


def measured(cell: Cell, seed: int, base: str, head: str, step_ms: float) -> dict[str, Any]:
    given = (
        *("--engine", "vllm", "--set", f"multiprocessing={cell.apart}", "--seed", str(seed)),
        *("--max-minutes", str(MINUTES[cell.apart])),
    )
    planted_us = SHARE * step_ms * 1e3 if cell.planted else 0.0
    if cell.planted:
        after = ("--after", f"python={head}", "--after", f"env.{PLANTED_US}={planted_us:.1f}")
        run = bench("run", *given, "--before", f"python={base}", *after)
    else:
        run = bench("aa", *given, "--set", f"python={base}")
    comparison = run["comparison"]
    turns = comparison["metrics"][definitions.SLICED]
    return {
        **asdict(cell),
        "planted_us": planted_us,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "blocks": comparison["trials"],
        **{name: comparison["interleaved"][name] for name in ("within", "between")},
        **{name: turns[name] for name in ("before", "change", "ci_low", "ci_high", "verdict")},
        "outputs": comparison["outputs"],
    }


def truth(run: dict[str, Any]) -> float:
    return float(run["planted_us"]) / 1e3 / float(run["before"])


def row(cell: Cell, runs: Sequence[dict[str, Any]]) -> list[str]:
    decided = [run for run in runs if run["ci_low"] is not None]  # of two blocks or more
    half_widths = [(run["ci_high"] - run["ci_low"]) / 2 for run in decided]
    # Of earlier runs alone: the model runner was taken for the device.
    host = [run["host"] for run in decided if "host" in run and run["host"]["ci_low"] is not None]
    of_host = [(each["ci_high"] - each["ci_low"]) / 2 for each in host]
    holding = sum(run["ci_low"] <= truth(run) <= run["ci_high"] for run in decided)
    return [
        PLACES[cell.apart],
        f"{SHARE:.0%} longer" if cell.planted else "one",
        str(len(runs)),
        f"{median(run['blocks'] for run in runs):g}",
        *(str(sum(run["verdict"] == verdict for run in runs)) for verdict in ("slower", "faster")),
        f"{holding} of {len(decided)}",
        f"{median(truth(run) for run in runs):.2%}" if cell.planted else "",
        f"{median(run['change'] for run in runs):+.2%}",
        *((f"±{median(half_widths):.2%}", f"±{max(half_widths):.2%}") if decided else ("", "")),
        f"{sum(each['ci_low'] > 0 for each in host)} of {len(host)}",
        f"±{median(of_host):.2%}" if host else "",
        f"{median(run['seconds'] for run in runs):.0f} s",
    ]


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", 2)
    base = interpreter()
    runs = earlier(__file__)
    begun = len(runs)
    with tempfile.TemporaryDirectory() as folder:
        head = build(base, Path(folder))
        for number, cell in enumerate(LISTED[begun : begun + wanted], begun):
            alike = [run["before"] for run in runs if run["apart"] == cell.apart and not run["planted"]]
            runs.append(measured(cell, number, base, head, median(alike) if alike else 0.0))
            write(runs)


def write(runs: list[dict[str, Any]]) -> None:
    found = [(each, [run for run in runs if Cell(run["apart"], run["planted"]) == each]) for each in CELLS]
    write_result(
        __file__,
        title=f"vLLM by turns: {len(runs)} of {len(LISTED)} runs, 95% intervals",
        header=HEADER,
        rows=[row(each, mine) for each, mine in found if mine],
        data=runs,
    )


if __name__ == "__main__":
    main()
