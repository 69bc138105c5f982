"""What turns gain over rounds where both arms are servers that know nothing of turns.

    python -m experiments.validation.server_turns [RUNS]    2 by default, five minutes

A server against itself: `bench serve` with the overlap engine, started by `cmd=`, eight streams at a time. A
fixed list of 20 runs of two minutes, by turns and by rounds in turn; each call does the next of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from harness.metrics import definitions

OPTIONS = "--engine overlap --set schedule=overlap --model tiny-gpt2"
SERVER = f"{sys.executable} -m harness serve {OPTIONS} --port {{port}}"
METHODS = {"turns": definitions.SLICED, "rounds": "tpot_ms_p50"}  # and the metric that decides
RUNS = 20
RUN = (
    *("aa", "--engine", "openai", "--set", f"cmd={SERVER}", "--max-minutes", "2"),
    *("--arrival", "closed", "--concurrency", "8", "--num-requests", "16", "--max-new-tokens", "128"),
)
HEADER = [
    "by",
    "metric",
    "runs",
    "called a change",
    "intervals that hold 0",
    "half-width, median",
    "narrowest",
    "widest",
    "blocks, median",
    "wall, median",
    "SD of a fixed loop",
]


def measured(method: str, seed: int) -> dict[str, Any]:
    run = bench(*RUN, "--seed", str(seed), "--primary", METHODS[method])
    comparison = run["comparison"]
    metric = comparison["metrics"][comparison["primary"]]
    return {
        "method": method,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        **{name: metric[name] for name in ("before", "change", "ci_low", "ci_high", "verdict")},
        **{
            name: comparison[name]
            for name in ("primary", "blocks", "outputs", "sliced")
            if name in comparison
        },
    }


def row(method: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    halves = sorted((run["ci_high"] - run["ci_low"]) / 2 for run in runs)
    return [
        method,
        METHODS[method],
        str(len(runs)),
        str(sum(run["verdict"] in ("faster", "slower") for run in runs)),
        f"{sum(run['ci_low'] <= 0 <= run['ci_high'] for run in runs)} of {len(runs)}",
        *(f"±{each:.2%}" for each in (median(halves), halves[0], halves[-1])),
        f"{median(run['blocks'] for run in runs):g}",
        f"{median(run['seconds'] for run in runs):.0f} s",
        f"{median(run['loop_sd'] for run in runs):.0%}",
    ]


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", len(METHODS))
    runs = earlier(__file__)
    for number in range(len(runs), min(RUNS, len(runs) + wanted)):
        runs.append(measured(list(METHODS)[number % len(METHODS)], number // len(METHODS)))
        write(runs)


def write(runs: list[dict[str, Any]]) -> None:
    found = {each: [run for run in runs if run["method"] == each] for each in METHODS}
    write_result(
        __file__,
        title=f"A server against itself, by turns and by rounds: {len(runs)} of {RUNS} runs, 95% intervals",
        header=HEADER,
        rows=[row(method, mine) for method, mine in found.items() if mine],
        data=runs,
    )


if __name__ == "__main__":
    main()
