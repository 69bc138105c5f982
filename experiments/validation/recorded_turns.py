"""The noise that turns meet on this machine: equal arms for three minutes, with every pair of turns.

    python -m experiments.validation.recorded_turns [RUNS]    4 by default, 12 minutes

A fixed list of runs of `bench aa --max-minutes 3`, of the two loops in turn; each call does the next ones.
`simulated_turns` plants changes in what they recorded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change
from experiments.validation.sliced_aa import LOOPS
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.store import tables

LISTED = [*LOOPS] * 2
MINUTES = 3
NS_PER_US = 1_000
HEADER = [
    "loop",
    "blocks",
    "pairs",
    "change",
    "scatter of a block's pairs, of boots",
    "wall",
    "SD of a loop",
    "commit",
]


def measured(loop: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--max-minutes", str(MINUTES), "--seed", str(seed))
        run = bench("aa", *LOOPS[loop], *flags, out=Path(folder))
        (stored,) = Path(folder).glob("*/manifest.json")
        blocks = [segments(stored.parent, number) for number in tables.finished_blocks(stored.parent)]
    return {
        "loop": loop,
        **{name: run[name] for name in ("seconds", "commit", "loop_sd")},
        **{name: run["comparison"]["interleaved"][name] for name in ("within", "between")},
        "turns": run["comparison"]["metrics"][SLICED],
        "blocks": blocks,
    }


def segments(run: Path, block: int) -> list[dict[str, Any]]:
    """The pairs of a block by segment: steps of a turn, and the mean step of each turn of both arms, us."""
    frame = tables.read_table(run, block, "slices")
    pairs = slices.pair(*(slices.decode_slices(frame[frame["arm"] == arm]) for arm in ("before", "after")))
    return [
        {
            "steps": int(part["steps"].iloc[0]),
            "before": (part["interval_ns_before"] // NS_PER_US).tolist(),
            "after": (part["interval_ns_after"] // NS_PER_US).tolist(),
        }
        for _, part in pairs.sort_values(["round", "turn"]).groupby("round")
    ]


def row(run: dict[str, Any]) -> list[str]:
    return [
        run["loop"],
        str(len(run["blocks"])),
        f"{sum(len(part['before']) for block in run['blocks'] for part in block):,}",
        change(run["turns"]),
        f"{run['within']:.2%}, {run['between']:.2%}",
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def write(runs: Sequence[dict[str, Any]]) -> None:
    write_result(
        __file__,
        title=f"Equal arms in turns for {MINUTES} minutes, {len(runs)} of {len(LISTED)} runs; 95% intervals",
        header=HEADER,
        rows=[row(each) for each in runs],
        data=runs,
    )


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", len(LISTED))
    runs = earlier(__file__)
    begun = len(runs)
    for seed, loop in enumerate(LISTED[begun : begun + wanted], begun):
        runs.append(measured(loop, seed))
        write(runs)


if __name__ == "__main__":
    main()
