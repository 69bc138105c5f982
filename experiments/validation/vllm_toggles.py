"""vLLM's argued changes at an H100's pace: whether each shortens its own phase, and what a step feels of it.

    python -m experiments.validation.vllm_toggles PYTHON FOLDER [--minutes 60] [--cell NAME ...]

PYTHON is vLLM's interpreter. A cell is one command of `bench`, of a few minutes: `slope BATCH off|on`, what a
microsecond in each phase costs a step, with async scheduling off or on (`bench sensitivity`); and `VARIANT
BATCH off|on`, a variant run whole in turns, which gives its phase and the step. Each is kept in FOLDER as it
ends, and a call goes on with what is missing until its minutes are over: slopes first, then every variant at
every batch without async scheduling, then at batch 64 with it. The page, FOLDER/vllm_toggles.md, is written
anew by each call, of what there is.

Foretold is the change of a variant's phase by the phase's slope at that batch; below it stands what the same
batch showed as a whole, where that was run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from experiments.common.command_line import parser
from experiments.common.record import Rows, write_result
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.metrics.definitions import SLICED, phase_in_turns
from overlap_bench.harness.plan.variants import Variant, load_variants

PACE = "llama3-8b-h100*k"
BATCHES = (1, 16, 64, 256)
MODES = ("off", "on")  # async scheduling
ASYNC_BATCH = 64  # at which each variant is run whole with async scheduling, too
MINUTES = 3  # of a variant's run
LEFT_OUT = ("vllm-compiled", "vllm-chunked-prefill")  # a pace decides both
Cells = dict[str, dict[str, Any]]


def variants() -> dict[str, Variant]:
    return {
        name: each for name, each in load_variants().items() if each.engine == "vllm" and name not in LEFT_OUT
    }


def wanted() -> Iterator[str]:
    """Every cell, the most useful first."""
    yield from (f"slope {batch} {mode}" for batch in BATCHES for mode in MODES)
    for name, each in variants().items():
        own = "async_scheduling" in each.changes
        yield from (f"{name} {batch} off" for batch in BATCHES)
        yield from () if own else (f"{name} {ASYNC_BATCH} on",)


def command(cell: str, python: str, out: Path) -> list[str]:
    """What measures a cell."""
    name, batch, mode = cell.split()
    at = ["--pace", PACE, "--arrival", "closed", "--concurrency", batch, "--num-requests", batch]
    at += ["--max-batch-size", batch, "--max-new-tokens", "64", "--set", f"python={python}"]
    if "async_scheduling" not in (() if name == "slope" else variants()[name].changes):
        at += ["--set", f"async_scheduling={mode}"]
    what = (
        ["sensitivity", "--engine", "vllm", "--set", "multiprocessing=off"]
        if name == "slope"
        else ["run", "--variant", name, "--max-minutes", str(MINUTES), "--format", "json"]
    )
    return [sys.executable, "-m", "overlap_bench", *what, *at, "--out", str(out)]


def measured(cell: str, python: str, folder: Path) -> dict[str, Any]:
    """What a cell found; why, where it could not be measured."""
    out = folder / "runs" / cell.replace(" ", "-")
    done = subprocess.run(command(cell, python, out), stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):  # 1: outputs differ, which the page says
        return {"failed": done.returncode}
    if cell.startswith("slope"):
        (found,) = out.glob("*/" + sensitivity.FILE)
        read = sensitivity.read(found.parent)
        return {
            "step_us": read.step_us,
            "phases": {
                each.phase: [each.us, each.slope, each.slope_low, each.slope_high] for each in read.phases
            },
        }
    (comparison,) = json.loads(done.stdout)["comparisons"]
    phase = variants()[cell.split()[0]].phase
    kept = {"step": SLICED, **({"phase": phase_in_turns(phase)} if phase else {})}
    rows = {
        what: {each: comparison["metrics"][name][each] for each in
               ("before", "after", "change", "ci_low", "ci_high", "verdict")}
        for what, name in kept.items()
        if name in comparison["metrics"]
    }  # fmt: skip
    return {**rows, "blocks": comparison["blocks"], "outputs": comparison["outputs"]}


def percent(row: Mapping[str, Any] | None) -> str:
    """ "−9.1% [−10%, −8%], faster"."""
    if row is None or row["change"] is None:
        return "–"
    between = "" if row["ci_low"] is None else f" [{row['ci_low']:+.1%}, {row['ci_high']:+.1%}]"
    return f"{row['change']:+.1%}{between}" + (f", {row['verdict']}" if row["verdict"] else "")


def foretold(cells: Cells, name: str, batch: int, mode: str) -> str:
    """What a step feels of a variant at a batch, as a share of it, by its phase and that phase's slope."""
    slope, run = cells.get(f"slope {batch} {mode}", {}), cells.get(f"{name} {batch} off", {})
    phase, row = variants()[name].phase, run.get("phase")
    if row is None or phase not in slope.get("phases", {}):
        return "–"
    _, felt, low, high = slope["phases"][phase]
    step = slope["step_us"]
    ends = [
        row["before"] * change * each / step
        for change in (row["ci_low"], row["ci_high"])
        for each in (low, high)
        if change is not None
    ]
    between = f" [{min(ends):+.2%}, {max(ends):+.2%}]" if ends else ""
    return f"{row['before'] * row['change'] * felt / step:+.2%}{between}"


def page(cells: Cells, folder: Path) -> None:
    own: Rows = [["change", "the source says", *(f"its phase at {batch}" for batch in BATCHES)]]
    felt: Rows = [["change", "async", *(f"foretold at {batch}" for batch in BATCHES)]]
    whole: Rows = [["change", "async", *(f"run whole at {batch}" for batch in BATCHES)]]
    for name, each in variants().items():
        if each.phase:
            phases = [percent(cells.get(f"{name} {batch} off", {}).get("phase")) for batch in BATCHES]
            own.append([name, each.claim, *phases])
        for mode in MODES:
            if each.phase:
                felt.append([name, mode, *(foretold(cells, name, batch, mode) for batch in BATCHES)])
            steps = [percent(cells.get(f"{name} {batch} {mode}", {}).get("step")) for batch in BATCHES]
            if set(steps) != {"–"}:
                whole.append([name, mode, *steps])
    write_result(
        __file__,
        title="vLLM's argued changes, judged",
        header=own[0],
        rows=own[1:],
        sections={"What a step feels": felt, "Run whole": whole},
        data=cells,
        folder=folder,
    )


def main() -> None:
    asked = parser(__file__, __doc__)
    asked.add_argument("python", metavar="PYTHON", help="vLLM's interpreter")
    asked.add_argument("folder", metavar="FOLDER", type=Path, help="where cells are kept")
    asked.add_argument("--minutes", type=float, default=60, help="begin no cell after so many (60)")
    asked.add_argument("--cell", action="append", default=[], metavar="NAME", help="these alone, once more")
    given = asked.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "cells.json"
    cells: Cells = json.loads(kept.read_text()) if kept.exists() else {}
    known = list(wanted())
    if unknown := [each for each in given.cell if each not in known]:
        asked.error(f"no cell {', '.join(unknown)}; there are {', '.join(known)}")
    began = monotonic()
    for cell in given.cell or [each for each in known if each not in cells]:
        if monotonic() - began > given.minutes * 60:
            break
        print(f"{cell}: {' '.join(command(cell, given.python, given.folder)[2:])}", file=sys.stderr)
        cells[cell] = measured(cell, given.python, given.folder)
        kept.write_text(json.dumps(cells, indent=1))
    page(cells, given.folder)


if __name__ == "__main__":
    main()
