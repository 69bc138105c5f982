"""vLLM's argued changes at an H100's pace: whether each shortens its own phase, and what a step feels of it.

    python -m experiments.validation.vllm_toggles PYTHON FOLDER [--minutes 60] [--cell NAME ...]

PYTHON is vLLM's interpreter. A cell is one command of `bench`, of a few minutes: `slope BATCH off|on`, what a
microsecond in each phase costs a step, with async scheduling off or on (`bench sensitivity`); and `VARIANT
BATCH off|on`, a variant run whole in turns, which gives its phase and the step. `k/2` or `2k` behind a cell:
with a device that takes half or twice as long. Each cell is kept in FOLDER as it ends, and a call goes on
with what is missing until its minutes are over: slopes first, then every variant at every batch without async
scheduling, then the other devices, then batch 64 with async scheduling; then what failed, once more.

The page, FOLDER/vllm_toggles.md, is written anew by each call, of what there is; vllm_judged publishes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

from experiments.common import judgement
from experiments.common.command_line import parser
from experiments.common.judgement import BATCHES, BETWEEN, HERE, HOSTS, MODES, PACE, cell_name, variants
from experiments.validation import vllm_judged
from overlap_bench.engines.vllm import SPEC
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.metrics.definitions import SLICED, phase_in_turns
from overlap_bench.harness.report.page import markdown_page

# Of a variant's run: 3 fit two trials on a slow host, which leave ±4%; at 256 a trial takes over a minute.
MINUTES = dict.fromkeys(BATCHES, 5) | {256: 7}
# New tokens of each request: where all have as many, all end in one step. What is done for one that ends is
# tried with requests that end one by one, from half of the run on.
NEW_TOKENS = {"vllm-remove-all": "uniform:32:96"}


def wanted() -> Iterator[str]:
    """Every cell, the most useful first."""
    elsewhere = [at for at in HOSTS if at != HERE]
    every = [(name, each, place) for name, each in variants().items() for place in judgement.places(each)]
    yield from (cell_name("slope", *place) for place in product(BATCHES, MODES))
    yield from (cell_name(name, *place) for name, _, place in every if place[1:] == ("off", HERE))
    yield from (cell_name("slope", BETWEEN, *place) for place in product(MODES, elsewhere))
    for name, each, place in every:
        if place[2] != HERE and not each.phase and place[1] == "off":
            yield cell_name(name, *place)  # of no phase: nothing foretells it
    for name, _, place in every:
        if place[0] == BETWEEN and place[1:] == ("on", HERE):
            yield cell_name(name, *place)


def left(known: Sequence[str], cells: judgement.Cells) -> list[str]:
    """The cells that a call goes on with: those that are missing, then those that failed."""
    failed = [each for each in known if "failed" in cells.get(each, {})]
    return [*(each for each in known if each not in cells), *failed]


def command(cell: str, python: str, out: Path) -> list[str]:
    """What measures a cell."""
    name, batch, mode, *stretched = cell.split()
    pace = PACE.format(at=(stretched or [HERE])[0])
    at = ["--pace", pace, "--arrival", "closed", "--concurrency", batch, "--num-requests", batch]
    at += ["--max-batch-size", batch, "--max-new-tokens", NEW_TOKENS.get(name, "64")]
    at += ["--set", f"python={python}"]
    if name == "slope" or judgement.modes(variants()[name]) == MODES:
        at += ["--set", f"async_scheduling={mode}"]
    minutes = str(MINUTES[int(batch)])
    what = (
        ["sensitivity", "--engine", "vllm", "--set", "multiprocessing=off"]
        if name == "slope"
        else ["run", "--variant", name, "--max-minutes", minutes, "--format", "json"]
    )
    return [sys.executable, "-m", "overlap_bench", *what, *at, "--out", str(out)]


def measured(cell: str, python: str, folder: Path) -> dict[str, Any]:
    """What a cell found; why, where it could not be measured."""
    out = judgement.run_folder(folder, cell)
    done = subprocess.run(command(cell, python, out), stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):  # 1: outputs differ, which the page says
        return {"failed": done.returncode}
    if cell.startswith("slope"):  # what it found is read where it was left
        found = max(out.glob("*/" + sensitivity.FILE), key=lambda each: each.stat().st_mtime_ns)
        read = sensitivity.read(found.parent)
        return {
            "step_us": read.step_us,
            "phases": {
                each.phase: [each.us, each.slope, each.slope_low, each.slope_high] for each in read.phases
            },
        }
    (comparison,) = json.loads(done.stdout)["comparisons"]
    metric = step_metric(cell.split()[0], comparison)
    phases = {each: its for each in SPEC.phases if (its := row(comparison, phase_in_turns(each)))}
    own = phases.get(variants()[cell.split()[0]].phase)
    return {
        "metric": metric,
        "step": row(comparison, metric),
        **({"phase": own} if own else {}),
        "phases": phases,
        "trials": comparison["trials"],
        "outputs": comparison["outputs"],
    }


def step_metric(name: str, comparison: Mapping[str, Any]) -> str:
    """What is shown as a step: what the variant decides by, as where the collector's pauses are not to be
    trimmed away; or else that of turns. Drafts leave turns no equal steps: what decided stands for one."""
    metrics = (variants()[name].primary, SLICED, comparison["primary"])
    return next(each for each in metrics if each in comparison["metrics"])


def row(comparison: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """What is kept of a metric; None where the run has none."""
    found = comparison["metrics"].get(metric)
    kept = ("before", "after", "change", "ci_low", "ci_high", "verdict")
    return None if found is None else {each: found[each] for each in kept}


def main() -> None:
    asked = parser(__file__, __doc__)
    asked.add_argument("python", metavar="PYTHON", help="vLLM's interpreter")
    asked.add_argument("folder", metavar="FOLDER", type=Path, help="where cells are kept")
    asked.add_argument("--minutes", type=float, default=60, help="begin no cell after so many (60)")
    asked.add_argument("--cell", action="append", default=[], metavar="NAME", help="these alone, once more")
    given = asked.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "cells.json"
    cells: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    known = list(wanted())
    there = {
        *known,
        *(cell_name(name, *at) for name, each in variants().items() for at in judgement.places(each)),
    }
    if unknown := [each for each in given.cell if each not in there]:
        asked.error(f"no cell {', '.join(unknown)}; there are {', '.join(sorted(there))}")
    began = monotonic()
    for cell in given.cell or left(known, cells):
        if monotonic() - began > given.minutes * 60:
            break
        print(f"{cell}: {' '.join(command(cell, given.python, given.folder)[2:])}", file=sys.stderr)
        cells[cell] = measured(cell, given.python, given.folder)
        kept.write_text(json.dumps(cells, indent=1))
    text = markdown_page(vllm_judged.page(vllm_judged.of_folder(given.folder)))
    (given.folder / "vllm_toggles.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
