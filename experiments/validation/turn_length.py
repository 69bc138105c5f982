"""Whether the change in turns depends on how long a turn is: what an arm leaves behind in caches would be a
larger part of a shorter one.

    python -m experiments.validation.turn_length [SETS]    1 by default

A set is a run of pinned-h2d in turns of 2, of 4, of 8 and of 16 steps, BLOCKS blocks each. Later calls add to
the runs of earlier ones.
"""

from __future__ import annotations

import tempfile
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import t

from engines import api
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier, loop_sd
from experiments.validation.main_command import change, half_width, scatter
from harness.analysis.result import to_plain
from harness.cli.progress import on_stderr
from harness.common.machine import code, guess_device
from harness.metrics import definitions
from harness.plan.request import Request
from harness.plan.settings import make_design
from harness.plan.variants import load_variants
from harness.studies import measure

LENGTHS = (4, 16, 2, 8)
BLOCKS = 10


def measured(steps: int, seed: int) -> dict[str, Any]:
    request = Request(variant="pinned-h2d", design={"blocks": BLOCKS, "rounds": 1, "seed": seed})
    design = make_design(request, api.find_engines(), load_variants(), guess_device)
    design = msgspec.structs.replace(design, turn_steps=steps)
    loop, began = loop_sd(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measure.measure(design, Path(folder), on_stderr)
    comparison = to_plain(found.result)["comparisons"][0]
    return {
        "steps": steps,
        "seconds": time.monotonic() - began,
        "commit": code().commit[:7],
        "loop_sd": loop,
        "turns": comparison["metrics"][definitions.SLICED],
        "sliced": comparison["sliced"],
    }


def slope(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Change per doubling of the turn, and the half-width of its 95% interval: least squares, weighted by the
    variance of each run, with the degrees of freedom of its blocks."""
    x = np.log2([run["steps"] for run in runs])
    y = np.log1p([run["turns"]["change"] for run in runs])
    weights = np.array([BLOCKS / run["turns"]["sd"] ** 2 for run in runs])
    centred = x - np.average(x, weights=weights)
    spread = float(np.sum(weights * centred**2))
    error = float(t.ppf(0.975, len(runs) * (BLOCKS - 1))) * spread**-0.5
    return float(np.sum(weights * centred * y)) / spread, error


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "SETS", 1) * len(LENGTHS)
    runs = earlier(__file__)
    for number in islice(count(len(runs)), wanted):
        runs.append(measured(LENGTHS[number % len(LENGTHS)], number // len(LENGTHS)))
        if len(runs) < 2:
            continue
        at, error = slope(runs)
        write_result(
            __file__,
            title=f"pinned-h2d in turns of different length: {at:+.2%} ± {error:.2%} per doubling",
            header=["steps a turn", "change", "half-width", "scatter of pairs, of boots", "pairs", "wall",
                    "SD of a loop", "commit"],
            rows=[
                [
                    str(run["steps"]),
                    change(run["turns"]),
                    f"±{half_width(run['turns']):.2%}",
                    scatter(run["sliced"]),
                    f"{run['sliced']['pairs']:,}",
                    f"{run['seconds']:.0f} s",
                    f"{run['loop_sd']:.1%}",
                    run["commit"],
                ]
                for run in runs
            ],
            data=runs,
        )  # fmt: skip


if __name__ == "__main__":
    main()
