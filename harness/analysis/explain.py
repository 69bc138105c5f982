"""`bench explain RUN`: where each decode step's interval goes, what made the late requests late, and what the
toggle should have given. Reads a stored run; what it prints is an `Explained`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, decision, stored, tail, words
from overlap_bench.harness.analysis.foretold import Foretold, foretell
from overlap_bench.harness.analysis.result import NoPrediction, Prediction, Settings
from overlap_bench.harness.analysis.sensitivity import read as read_sensitivity
from overlap_bench.harness.analysis.verdict_warnings import Unattributed
from overlap_bench.harness.analysis.warnings import Warning, ranked
from overlap_bench.harness.metrics import attribution, definitions, ranks, slices
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.nodes import of_nodes
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.tables import Block

MOST_UNATTRIBUTED = 0.03  # of a step, above which a warning says so
SHOWN_CAUSES = 3


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the decode step, us, and what share of the step it is; one arm alone has `before` only."""

    before: float
    after: float | None = None
    delta: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p: float | None = None  # of no change
    share_before: float
    share_after: float | None = None

    @property
    def change(self) -> None:
        """None: parts are told in us."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's times of one rank of a model that spans several devices: means over blocks of the decode
    steps' (metrics.ranks.times), at the arm's own batches."""

    arm: str
    rank: int
    exposed_host_us: float
    device_busy: float
    waiting_us: float  # of its device, for the rank that came last


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of a finished run say of its time. One arm alone has no `after`. `headline`: what the
    run says first; `largest`: as of largest_change."""

    schema_version: int
    run: str
    device: str
    variant: str
    headline: str
    before: Settings
    after: Settings | None
    blocks: int = msgspec.field(name="trials")
    unit: Literal["trial", "node"] = "trial"  # what intervals of `step_us` are over
    confidence: float
    measured_in: Literal["turns", "rounds"]
    why_rounds: str  # although there were turns, or may have been; "" else
    intervals: dict[str, int]  # decode intervals by arm; of turns, their pairs
    largest: str | None
    device_holds: str  # besides the device's own work (EngineSpec.device_holds)
    step_us: dict[str, Part]  # "interval", then attribution.PARTS
    ranks: list[RankTimes]  # none where each model has one device
    tail: list[tail.Tail]
    prediction: Prediction | NoPrediction | None
    warnings: list[Warning]
    foretold: Foretold | None = None  # where a sensitivity was given


def explain(folder: Path, sensitivity: Path | None = None) -> Explained:
    """Explain a finished run; by a `sensitivity` of its before arm, a folder, also what it should have given.

    Raises StoreError where a folder can't be read or the run is not finished, and BadSetting where it has
    no step records to explain, or the sensitivity is another's.
    """
    known = None if sensitivity is None else read_sensitivity(sensitivity)
    manifest = stored.readable(folder)
    stored.check_two(folder, manifest)
    blocks, per_block = stored.finished(folder, manifest)
    design = manifest.design
    found = comparison.comparison(manifest, blocks, per_block)
    alpha = design.alpha(len(blocks))
    blocks = [block for block in blocks if block.number not in found.left_out]
    in_turns = of_turns(design, blocks)
    means, intervals = of_rounds(design, blocks, folder) if in_turns is None else in_turns
    values = {
        name: [[arm[name] for arm in block] for block in means] for name in ("interval", *attribution.PARTS)
    }
    by_node = found.nodes is not None and found.nodes.unit == "node"
    counted = of_each_node(values, blocks) if by_node else values
    step = {name: _part(each, counted["interval"], alpha) for name, each in counted.items()}
    device = manifest.descriptions[design.arms[0].name].device["kind"]
    return Explained(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        device=device,
        variant=design.name,
        headline=words.conclusion(device, found),
        before=found.before,
        after=found.after,
        blocks=len(blocks),
        unit="node" if by_node else "trial",
        confidence=1 - alpha,
        measured_in="rounds" if in_turns is None else "turns",
        why_rounds=why_rounds(design) if in_turns is None else "",
        intervals=intervals,
        largest=largest_change(step, alpha),
        device_holds=" and ".join(dict.fromkeys(filter(None, (arm.device_holds for arm in design.arms)))),
        step_us=step,
        ranks=[times for arm in design.arms for times in rank_times(arm, blocks)],
        tail=tails(design.arms, blocks),
        prediction=found.prediction,
        warnings=ranked([*(each for each in found.warnings if each.leads), *warnings(step)]),
        foretold=None
        if known is None
        else foretell(
            known,
            design,
            blocks,
            values["interval"],
            values["device"],
            alpha,
            manifest.descriptions[design.arms[0].name],
        ),
    )


# Of each block, of each arm: us of a step in "interval" and in each of attribution.PARTS. And how many
# intervals that are, by arm.
Means = tuple[list[list[dict[str, float]]], dict[str, int]]


def of_turns(design: Design, blocks: Sequence[Block]) -> Means | None:
    """From the turns of two arms; None where some block's hold no parts of steps, or too few pairs."""
    if len(design.arms) != 2:
        return None
    every, means, pairs = design.primary == definitions.SLICED_MEAN, [], 0
    for block in blocks:
        sides = [block.of(arm.name, "slices") for arm in design.arms]
        found = slices.parts_of_step(sides[0], sides[1], every) if all(map(len, sides)) else None
        if found is None:
            return None
        means.append(
            [
                {"interval": sum(parts.values()) / 1e3, **{name: each / 1e3 for name, each in parts.items()}}
                for parts in found
            ]
        )
        pairs += len(slices.pair(*map(slices.decode_slices, sides)))
    return means, dict.fromkeys((arm.name for arm in design.arms), pairs)


def of_rounds(design: Design, blocks: Sequence[Block], folder: Path) -> Means:
    """From the records of rounds, at the before arm's batches. Raises BadSetting where there are none."""
    arms = [[of_boot(block, arm, folder) for block in blocks] for arm in design.arms]
    means = [attribution.matched_means([boots[number] for boots in arms]) for number in range(len(blocks))]
    named = [
        [{"interval": each["interval_ns"], **{part: each[part] for part in attribution.PARTS}} for each in of]
        for of in means
    ]
    return named, {arm.name: sum(map(len, boots)) for arm, boots in zip(design.arms, arms, strict=True)}


def of_each_node(
    values: Mapping[str, Sequence[Sequence[float]]], blocks: Sequence[Block]
) -> dict[str, list[list[float]]]:
    """One row a node in place of one a trial, the mean of its trials: what counts where nodes disagree."""
    nodes = [block.node for block in blocks]
    means = {
        name: [of_nodes(list(arm), nodes, "difference") for arm in zip(*rows, strict=True)]
        for name, rows in values.items()
    }
    return {name: [list(each) for each in zip(*arms, strict=True)] for name, arms in means.items()}


def why_rounds(design: Design) -> str:
    """Why turns do not tell where a step goes; "" of one arm, which takes none."""
    if len(design.arms) < 2:
        return ""
    if not design.segments:
        return "this run took no turns"
    return (
        "turns do not tell it here (an earlier version measured them, or too few have a partner), and with "
        "arrivals, and one arm at a time, the step may change by another share"
    )


def largest_change(step: Mapping[str, Part], alpha: float) -> str | None:
    """The part that changed most, of those whose interval leaves out 0; None of none, and where there are no
    more of them than chance makes among so many parts (Holm)."""
    parts = {name: part for name, part in step.items() if name != "interval" and (part.before or part.after)}
    changed = {name: part.p for name, part in parts.items() if part.p is not None}
    if min(decision.holm(changed).values(), default=1.0) >= alpha:
        return None
    told = [name for name, p in changed.items() if p < alpha]
    return max(told, key=lambda name: abs(parts[name].delta or 0.0))


def of_boot(block: Block, arm: Arm, folder: Path) -> pd.DataFrame:
    """attribution.attribute of one boot. Raises BadSetting where it has nothing to attribute."""
    steps, work = block.of(arm.name, "steps"), block.of(arm.name, "work")
    where = f"{folder}, trial {block.number}, arm {arm.name}"
    if not len(steps):
        off = not arm.options.recorder
        none = f"the engine {arm.engine} records none, or steps.parquet is gone"
        why = "it ran with recorder=off" if off else none
        raise api.BadSetting(f"{where} has no step records to explain: {why}")
    parts = attribution.attribute(steps, work, arm.toggles.get("launch") == "thread")
    if not len(parts):
        raise api.BadSetting(f"{where} has no two decode steps in a row, so no interval to explain")
    return parts


def _part(per_block: Sequence[Sequence[float]], whole: Sequence[Sequence[float]], alpha: float) -> Part:
    """One part of the step: per block, its value in each arm, and the whole step's."""
    values, steps = (np.array(each, np.float64).T for each in (per_block, whole))
    if not np.isfinite(values).all():
        raise api.BadSetting("in some trial the arms have no batch size in common, so no step to compare")
    before = float(values[0].mean())
    share = before / float(steps[0].mean())
    if len(values) == 1:
        return Part(before=before, share_before=share)
    effect = paired.effect(list(values[0]), list(values[1]), "difference", alpha)
    return Part(
        before=before,
        after=effect.after,
        delta=effect.delta,
        ci_low=effect.low,
        ci_high=effect.high,
        p=effect.p,
        share_before=share,
        share_after=effect.after / float(steps[1].mean()),
    )


def rank_times(arm: Arm, blocks: Sequence[Block]) -> list[RankTimes]:
    """The times of each of the arm's ranks; none where it has one."""
    boots = [ranks.times(block.of(arm.name, "steps"), block.of(arm.name, "work")) for block in blocks]
    of_ranks = list(zip(*boots, strict=True))
    if len(of_ranks) < 2:
        return []
    return [
        RankTimes(
            arm=arm.name,
            rank=rank,
            **{name: float(np.mean([each[name] for each in per_block])) for name in ranks.TIMES},
        )
        for rank, per_block in enumerate(of_ranks)
    ]


def tails(arms: Sequence[Arm], blocks: Sequence[Block]) -> list[tail.Tail]:
    """For each arm, metric and level, in that order."""
    found = []
    for arm in arms:
        boots = [tail.split(block.of(arm.name, "requests"), block.of(arm.name, "steps")) for block in blocks]
        for metric in tail.TAILS:
            for level in tail.LEVELS:
                late = tail.late(arm.name, metric, [boot[metric] for boot in boots], level)
                found += [] if late is None else [late]
    return found


def warnings(step: Mapping[str, Part]) -> list[Warning]:
    rest = step["unattributed"]
    return [
        Unattributed(side, share)
        for side, share in (("before", rest.share_before), ("after", rest.share_after))
        if share is not None and share > MOST_UNATTRIBUTED
    ]
