"""vLLM at an H100's pace, arms that are equal and arms that differ by 1%: what runs of six blocks call them.

    python -m experiments.validation.vllm_verdicts PYTHON FOLDER [BLOCKS]    120 blocks by default, 65 minutes

One run of three arms in turns, async scheduling off, batch 16: `before`, `equal`, and `slower`, whose
scheduler computes for about 1% of a step more. Each six blocks of it, in their order, are judged as a run of
their own; only the boots that a run throws away, and k, are shared. Then RUNS of six are drawn from all
blocks, each with its arms as they were or swapped, so that there is no change to be found. FOLDER keeps the
run: called again, it is gone on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from experiments.common.command_line import parser
from experiments.common.record import write_result
from overlap_bench.engines import api
from overlap_bench.harness.analysis.decision import detected
from overlap_bench.harness.cli.progress import on_stderr
from overlap_bench.harness.common.intervals import Floats
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import fresh, read_manifest, stored
from overlap_bench.harness.studies import measure

PLANTED_NS = 96_000  # about 1% of a step here; what share it was is taken from what was measured
BLOCKS_OF_RUN = 6
RUNS = 10_000  # drawn
BATCH = 16


def design(python: str, blocks: int) -> Design:
    request = Request(
        engine="vllm",
        both=(f"python={python}", "async_scheduling=off", "multiprocessing=off"),
        against_itself=True,
        options={"pace": "llama3-8b-h100*k", "max_context": 2048},
        workload={"arrival": "closed", "num_requests": BATCH, "concurrency": BATCH, "max_new_tokens": 64},
        design={"blocks": blocks, "segments": 6, "rounds": 1},
    )
    made = make_design(request, api.find_engines(), load_variants(), guess_device)
    arms = [
        msgspec.structs.replace(
            made.arms[0],
            name=name,
            options=msgspec.structs.replace(made.arms[0].options, plant_at="host", plant_ns=ns),
        )
        for name, ns in (("before", 0), ("equal", 0), ("slower", PLANTED_NS))
    ]
    return msgspec.structs.replace(made, name="vllm-verdicts", arms=tuple(arms))


def block(folder: Path, number: int) -> dict[str, Any]:
    """What one block gives: the log of each arm's change in turns, what was planted as a share of a step, and
    the mean step of `before`, ns."""
    turns = tables.read_table(folder, number, "slices")
    rounds = tables.read_table(folder, number, "rounds")
    steps = tables.read_table(folder, number, "steps")
    decodes = {
        name: slices.decode_slices(turns[turns["arm"] == name]) for name in ("before", "equal", "slower")
    }
    step_ns = float(np.exp(slices.trimmed(np.log(decodes["before"]["interval_ns"]))))
    planted = float(rounds.loc[rounds["arm"] == "slower", "counter.planted_host_ns"].sum())
    ran = int((steps["arm"] == "slower").sum())
    found: dict[str, Any] = {"step_ns": step_ns, "planted": planted / ran / step_ns}
    for name in ("equal", "slower"):
        pairs = slices.pair(decodes["before"], decodes[name])
        found[name] = slices.trimmed(np.log(pairs["interval_ns_after"] / pairs["interval_ns_before"]))
    return found


def judged(logs: Floats) -> paired.Effect:
    """Blocks as a run judges them."""
    return paired.effect([1.0] * len(logs), np.exp(logs).tolist())


def run_of(blocks: list[dict[str, Any]]) -> list[str]:
    """Six blocks as a row: equal arms, and the planted change."""
    equal, slower = (judged(np.array([each[name] for each in blocks])) for name in ("equal", "slower"))
    truth = float(np.mean([each["planted"] for each in blocks]))
    assert slower.low is not None
    assert slower.high is not None
    return [
        interval(equal),
        "a change" if detected(equal) else "none",
        f"{truth:+.2%}",
        interval(slower),
        "yes" if detected(slower) and slower.low > 0 else "no",
        "yes" if slower.low <= truth <= slower.high else "no",
    ]


def interval(effect: paired.Effect) -> str:
    return f"{effect.change:+.2%} [{effect.low:+.2%}, {effect.high:+.2%}]"


def replayed(logs: Floats, random: np.random.Generator) -> int:
    """How many of RUNS of six blocks find a change, drawn from these, their arms as they were or swapped."""
    drawn = random.choice(logs, (RUNS, BLOCKS_OF_RUN)) * random.choice((-1, 1), (RUNS, BLOCKS_OF_RUN))
    return sum(detected(judged(each)) for each in drawn)


def main() -> None:
    asked = parser(__file__, __doc__)
    asked.add_argument("python", metavar="PYTHON", help="vLLM's interpreter")
    asked.add_argument("folder", metavar="FOLDER", type=Path, help="where the run is kept")
    asked.add_argument("blocks", metavar="BLOCKS", nargs="?", type=int, default=120, help="default: 120")
    given = asked.parse_args()
    folder = next(iter(given.folder.glob("*/manifest.json")), given.folder).parent
    if folder == given.folder.parent:
        measure.measure(fresh(design(given.python, given.blocks), given.folder), on_stderr)
        folder = next(given.folder.glob("*/manifest.json")).parent
    elif len(tables.finished_blocks(folder)) < min(given.blocks, read_manifest(folder).design.blocks):
        measure.measure(stored(folder, None, lambda *stored: True), on_stderr)
    blocks = [block(folder, number) for number in tables.finished_blocks(folder)[: given.blocks]]
    runs = [
        blocks[at : at + BLOCKS_OF_RUN] for at in range(0, len(blocks) - BLOCKS_OF_RUN + 1, BLOCKS_OF_RUN)
    ]
    rows = [run_of(each) for each in runs]
    equal = np.array([each["equal"] for each in blocks])
    called = replayed(equal, np.random.default_rng(0))
    low, high = stats.binomtest(called, RUNS).proportion_ci()
    widths = [(one.high - one.low) / 2 for one in map(judged, equal[: len(runs) * 6].reshape(-1, 6))]  # type: ignore[operator]
    write_result(
        __file__,
        title=f"vLLM at an H100's pace: equal arms, and 1% more, in {len(runs)} runs of six blocks",
        header=["equal arms", "called", "planted", "measured", "seen", "in the interval"],
        rows=rows,
        sections={
            "All together": [
                ["", "", ""],
                ["equal arms, all blocks", interval(judged(equal)), f"{len(blocks)} blocks"],
                ["half-width of a run, median", f"{np.median(widths):.2%}", f"most {max(widths):.2%}"],
                ["called a change", f"{sum(row[1] != 'none' for row in rows)} of {len(rows)}", ""],
                ["drawn runs called a change", f"{called / RUNS:.2%}", f"[{low:.2%}, {high:.2%}]"],
                ["planted: seen", f"{sum(row[4] == 'yes' for row in rows)} of {len(rows)}", ""],
                ["planted: in the interval", f"{sum(row[5] == 'yes' for row in rows)} of {len(rows)}", ""],
            ]
        },
        data=blocks,
    )


if __name__ == "__main__":
    main()
