"""What the toggles of several devices do, on two whose decode step takes 10 ms, and how busy they are.

    python -m experiments.validation.rank_variants [NAME ...]    all that are not there yet, ten minutes

Each is one `bench run --pace 10ms --max-minutes 3`: how a step's metadata reaches the other rank (share),
where replicas agree on each step (sync-ranks), and what overlap is worth where a model spans two devices, at
batch 16. A name that is given is measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from harness.analysis import explain
from harness.common.machine import code

RUNS = {
    "shared-ring": ("--variant", "shared-ring"),
    "shared-ring, overlapped": ("--variant", "shared-ring", "--set", "schedule=overlap"),
    "sync-ranks": ("--variant", "sync-ranks"),
    "overlap, 2 ranks": ("--variant", "overlap", "--set", "ranks=2"),
}
LOAD = ("--arrival", "closed", "--concurrency", "16", "--num-requests", "32", "--max-new-tokens", "64")
FLAGS = ("--pace", "10ms", "--max-minutes", "3", *LOAD)
TIMES = {"share_ns": "share", "sync_ranks_ns": "sync-ranks"}  # of a step, by counter
HEADER = [
    "run",
    "metric",
    "before, ms",
    "change",
    "half-width",
    "verdict",
    "what it took a step, ms",
    "device busy, by rank",
    "waiting for the slowest rank, us",
    "outputs equal",
    "blocks",
    "wall",
    "commit",
]


def measured(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "run", *RUNS[name], *FLAGS]
        began = perf_counter()
        done = subprocess.run(
            [*command, "--out", folder, "--format", "json"], stdout=subprocess.PIPE, text=True, check=True
        )
        seconds = perf_counter() - began
        (run,) = Path(folder).iterdir()
        ranks = explain.explain(run).ranks
    (comparison,) = json.loads(done.stdout)["comparisons"]
    metric = comparison["metrics"][comparison["primary"]]
    return {
        "name": name,
        "seconds": seconds,
        "commit": code().commit[:7],
        **{each: comparison[each] for each in ("primary", "mechanism", "limit", "outputs", "blocks")},
        **{each: metric[each] for each in ("before", "change", "ci_low", "ci_high", "verdict")},
        "ranks": [
            {"arm": each.arm, "rank": each.rank, "busy": each.device_busy, "waiting_us": each.waiting_us}
            for each in ranks
        ],
    }


def row(run: dict[str, Any]) -> list[str]:
    took = [
        f"{TIMES[name]} {each['before'] / 1e6:.3f} → {each['after'] / 1e6:.3f}"
        for name, each in run["mechanism"].items()
        if name in TIMES
    ]
    arms = {arm: [each for each in run["ranks"] if each["arm"] == arm] for arm in ("before", "after")}
    busy = [" and ".join(f"{each['busy']:.1%}" for each in arms[arm]) for arm in arms if arms[arm]]
    waiting = [" and ".join(f"{each['waiting_us']:.0f}" for each in arms[arm]) for arm in arms if arms[arm]]
    alone = run["limit"]["device_busy"]
    return [
        run["name"],
        run["primary"],
        f"{run['before']:.3f}",
        f"{run['change']:+.2%}",
        f"±{(run['ci_high'] - run['ci_low']) / 2:.2%}",
        run["verdict"],
        ", ".join(took),
        " → ".join(busy) or f"{alone['before']:.1%} → {alone['after']:.1%} (the first's)",
        " → ".join(waiting),
        f"{run['outputs']['identical']} of {run['outputs']['compared']}",
        str(run["blocks"]),
        f"{run['seconds']:.0f} s",
        run["commit"],
    ]


def main() -> None:
    runs = {run["name"]: run for run in earlier(__file__)}
    for name in command_line.to_measure(__file__, __doc__, RUNS, runs):
        runs[name] = measured(name)
        write(runs)


def write(runs: dict[str, dict[str, Any]]) -> None:
    found = [runs[each] for each in RUNS if each in runs]
    write_result(
        __file__,
        title="Two devices whose decode step takes 10 ms, 95% intervals",
        header=HEADER,
        rows=[row(each) for each in found],
        data=found,
    )


if __name__ == "__main__":
    main()
