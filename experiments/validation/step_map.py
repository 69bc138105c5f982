"""Where each optimization matters: its change of a decode step, by the device's time for it and by batch.

    python -m experiments.validation.step_map [PACE ...]    all that are not there yet: 2ms 5ms 10ms 20ms 50ms

On the paced emulated device. Variants that change the decode step are measured family by family: all arms of
a family boot together and take turns, so an arm that two variants share is measured once. A point is a
variant, a pace and a batch: the change of `decode_step_ms` over 4 blocks. Where an arm's programs computed
for longer than their pace in 1% of steps or more, the device had no known speed: such a point stays out of
the figure, and the table says so. Each family of a pace is kept once it is done; a pace that is named is
measured again.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from experiments.common.repeated_runs import earlier, loop_sd
from overlap_bench.harness.analysis.experiment_result import Change, ExperimentResult, Level
from overlap_bench.harness.common.machine import code
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.experiment_file import (
    ArmSettings,
    Boots,
    Claim,
    Column,
    Experiment,
    Layout,
    Plan,
    Row,
)
from overlap_bench.harness.plan.settings import PACED_MODEL
from overlap_bench.harness.plan.variants import Variant, load_variants
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.run.messages import Event, Observer, Said
from overlap_bench.harness.studies import experiment

# Pace of a decode step: segments of each workload. A long step needs fewer for the same share of itself.
PACES = {"2ms": 3, "5ms": 3, "10ms": 2, "20ms": 1, "50ms": 1}
PREFILL = "40ms"  # far above what it computes; it is in no pair
BATCHES = (1, 16, 64)
ASIDE = {1: 0.94, 16: 1.0, 64: 1.06}  # where a batch stands beside its pace in the figure
TOKENS = 32
BLOCKS = 4
OVERRUN = 0.01  # of steps, from which on a point says nothing of its pace


@dataclass(frozen=True, slots=True)
class Family:
    """Variants that are measured together, with options that all of their arms have."""

    name: str
    variants: tuple[str, ...]
    stream_interval: int


FAMILIES = (
    Family("metadata", ("pinned-h2d", "packed-h2d", "pin-per-call", "event-d2h", "dirty-rows"), 8),
    Family("output", ("deferred-output", "async-output", "offload-output"), 1),
    Family("overlap", ("overlap", "inline-launch", "copy-done", "copy-then-launch", "cuda-graph"), 8),
)


@dataclass(frozen=True, slots=True)
class Point:
    """The change of a decode step (a fraction, with its 95% interval), and the larger share of overrun steps
    of the two arms."""

    variant: str
    pace: str
    batch: int
    change: float
    low: float
    high: float
    overrun: float

    @property
    def holds(self) -> bool:
        return self.overrun < OVERRUN


def arms_of(variants: Sequence[Variant]) -> tuple[dict[str, ArmSettings], dict[str, tuple[str, str]]]:
    """Each setting once, under the name of the first side that has it; and the two arms of each variant."""
    arms: dict[str, ArmSettings] = {}
    names: dict[frozenset[tuple[str, str]], str] = {}
    sides: dict[str, tuple[str, str]] = {}
    for each in variants:
        found = []
        for side, toggles in (("before", each.before), ("after", each.after)):
            name = names.setdefault(frozenset(toggles.items()), f"{each.name}:{side}")
            arms.setdefault(name, ArmSettings(variant=f"{each.name}:{side}"))
            found.append(name)
        sides[each.name] = (found[0], found[1])
    return arms, sides


def plan(family: Family, pace: str) -> Plan:
    """One family at one pace, as an experiment: a claim for each point, a table of overruns."""
    variants = load_variants()
    arms, sides = arms_of([variants[name] for name in family.variants])
    workloads: dict[str, dict[str, str | int | float | bool | None]] = {
        str(batch): {
            "prompts": "english",
            "input_tokens": 16,
            "arrival": "closed",
            "concurrency": batch,
            "num_requests": batch,
            "max_new_tokens": TOKENS,
        }
        for batch in BATCHES
    }
    boots = Boots(
        arms=arms,
        workloads=workloads,
        options={
            "model": PACED_MODEL,
            "pace": f"decode={pace},prefill={PREFILL}",
            "stream_interval": family.stream_interval,
            "max_batch_size": max(BATCHES),
            "prefill_max_batch_size": max(BATCHES),
        },
        blocks=BLOCKS,
        rounds=1,
        segments=PACES[pace],
        primary=SLICED,
    )
    return Plan(
        experiment=Experiment(
            name=f"step-map-{family.name}-{pace}",
            title="",
            question="",
            sources=[],
            boots={"": boots},
            claims=[
                Claim(says=name, boots="", workload=str(batch), before=before, arm=after, change=SLICED)
                for name, (before, after) in sides.items()
                for batch in BATCHES
            ],
            tables=[
                Layout(
                    title="overruns",
                    boots="",
                    columns=[Column(title="steps", value="paced_overruns")],
                    rows=[Row(label=name, arm=name) for name in arms],
                )
            ],
        ),
        kind="emulated",
    )


def points(family: Family, pace: str, result: ExperimentResult) -> Iterator[Point]:
    overruns: dict[tuple[str, str], float] = {}
    for batch, arm, share in result.tables[0].rows:
        assert isinstance(share, Level), f"{arm} at batch {batch} counts no overruns"
        overruns[str(batch), str(arm)] = share.value
    for claim in result.claims:
        if not isinstance(claim.measured, Change):
            print(f"{claim.says}, {pace}, batch {claim.workload}: too few pairs", file=sys.stderr)
            continue
        yield Point(
            variant=claim.says,
            pace=pace,
            batch=int(claim.workload),
            change=claim.measured.value,
            low=claim.measured.low,
            high=claim.measured.high,
            overrun=max(overruns[claim.workload, str(arm)] for arm in (claim.before, claim.after)),
        )


@contextmanager
def quiet(folder: Path, design: Design) -> Iterator[Observer]:
    """Only what a person should see."""

    def say(event: Event) -> None:
        if isinstance(event, Said):
            print(event.line, file=sys.stderr)

    yield say


def measured(family: Family, pace: str) -> dict[str, Any]:
    noise, began = loop_sd(), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = experiment.run(plan(family, pace), Path(folder), quiet)
    found = outcome.result
    return {
        "family": family.name,
        "pace": pace,
        "points": [asdict(each) for each in points(family, pace, found)],
        "outputs": {"compared": found.outputs.compared, "identical": found.outputs.identical},
        "seconds": perf_counter() - began,
        "loop_sd": noise,
        "commit": code().commit[:7],
        "warnings": [each.text for each in found.warnings],
    }


def cell(point: Point | None) -> str:
    if point is None:
        return "–"
    if not point.holds:
        return f"({point.overrun:.0%} overrun)"
    half = (point.high - point.low) / 2
    return f"{point.change:+.2%} ±{half:.2%}"


def write(runs: Sequence[Mapping[str, Any]]) -> None:
    found = {
        (each.variant, each.pace, each.batch): each
        for run in runs
        for each in (Point(**values) for values in run["points"])
    }
    order = [name for family in FAMILIES for name in family.variants]
    known = [name for name in order if any(name == variant for variant, *_ in found)]
    outputs = [sum(run["outputs"][name] for run in runs) for name in ("identical", "compared")]
    minutes = sum(run["seconds"] for run in runs) / 60
    loops = [run["loop_sd"] for run in runs]
    write_result(
        __file__,
        title="The change of a decode step by the device's time for it, and by batch; emulated device, "
        "paced, 4 trials a point, 95% intervals; (2% overrun): not shown, as 2% of its steps computed for "
        f"longer than the pace. Outputs {outputs[0]:,} of {outputs[1]:,} equal; "
        f"{minutes:.0f} minutes; a fixed loop had an SD of {min(loops):.0%} to {max(loops):.0%} between "
        "calls",
        header=["variant", "batch", *PACES],
        rows=[
            [name, str(batch), *(cell(found.get((name, pace, batch))) for pace in PACES)]
            for name in known
            for batch in BATCHES
        ],
        data=list(runs),
    )
    draw(found, known)


def draw(found: Mapping[tuple[str, str, int], Point], names: Sequence[str]) -> None:
    """A panel a variant, a line a batch; all panels of a row have one scale."""
    across = 4
    down = -(-len(names) // across)
    with style.drawing():
        made = Figure(figsize=(9.6, 2.2 * down + 0.5), layout="constrained")
        panels: list[Axes] = list(made.subplots(down, across, sharex=True, squeeze=False).flat)
        for panel in panels[len(names) :]:
            panel.remove()
        for name, panel in zip(names, panels, strict=False):
            panel.axhline(0, color=style.MUTED, lw=1)
            for look, batch in zip(style.OTHERS[1:], BATCHES, strict=False):
                line = [
                    each
                    for pace in PACES
                    if (each := found.get((name, pace, batch))) is not None and each.holds
                ]
                if not line:
                    continue
                places = [float(each.pace.removesuffix("ms")) * ASIDE[batch] for each in line]
                changes = [100 * each.change for each in line]
                below = [100 * (each.change - each.low) for each in line]
                above = [100 * (each.high - each.change) for each in line]
                panel.errorbar(
                    places, changes, yerr=[below, above], color=look.colour, marker=look.marker,
                    linestyle=look.line, markerfacecolor=look.face, capsize=2, label=f"batch {batch}",
                )  # fmt: skip
            panel.set_title(name)
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(FixedLocator([float(each.removesuffix("ms")) for each in PACES]))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter("{x:g}")
            panel.tick_params(labelbottom=True)
            low, high = panel.get_ylim()
            panel.set_ylim(min(low, -1.5), max(high, 1.5))
        made.supxlabel("device time of a decode step (ms, log scale)", size=9)
        made.supylabel("change of the decode step (%), 95% interval; below 0 is faster", size=9)
        style.legend_below(made, panels[0])
        made.savefig(FOLDER / f"{Path(__file__).stem}.png", dpi=110)


def main() -> None:
    asked = command_line.chosen(__file__, __doc__, list(PACES))
    runs = {(run["pace"], run["family"]): run for run in earlier(__file__)}
    for pace in asked or PACES:
        for family in FAMILIES:
            if asked or (pace, family.name) not in runs:
                runs[pace, family.name] = measured(family, pace)
                places = [(each, one.name) for each in PACES for one in FAMILIES]
                write([runs[place] for place in places if place in runs])


if __name__ == "__main__":
    main()
