"""`bench explain RUN`: where each decode step's interval goes, what made the late requests late, and what the
toggle should have given. Reads a stored run; what it prints is an `Explained`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engines import api
from harness.analysis import comparison, stored, tail
from harness.analysis.result import NoPrediction, Prediction, Settings, Warning
from harness.analysis.values import block_values
from harness.metrics import attribution, ranks
from harness.plan.design import Arm
from harness.stats import paired
from harness.store.block import Block
from harness.store.files import SCHEMA_VERSION
from harness.store.manifest import Manifest

if TYPE_CHECKING:
    import pandas as pd

MOST_UNATTRIBUTED = 0.03  # of a step, above which a warning says so
SHOWN_CAUSES = 3


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the decode step, us, and what share of the step it is; one arm alone has `before` only."""

    before: float
    after: float | None = None
    delta: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
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
    """What the records of a finished run say of its time. One arm alone has no `after`."""

    schema_version: int
    run: str
    device: str
    variant: str
    before: Settings
    after: Settings | None
    blocks: int
    confidence: float
    intervals: dict[str, int]  # decode intervals by arm
    device_holds: str  # besides the device's own work (EngineSpec.device_holds)
    step_us: dict[str, Part]  # "interval", then attribution.PARTS
    ranks: list[RankTimes]  # none where each model has one device
    tail: list[tail.Tail]
    prediction: Prediction | NoPrediction | None
    warnings: list[Warning]


def explain(folder: Path) -> Explained:
    """Explain a finished run.

    Raises StoreError where the folder can't be read or the run is not finished, and BadSetting where it has
    no step records to explain.
    """
    manifest = stored.readable(folder)
    stored.check_two(folder, manifest)
    blocks, _ = stored.finished(folder, manifest)
    design = manifest.design
    arms = [[of_boot(block, arm, folder) for block in blocks] for arm in design.arms]
    alpha = design.alpha(len(blocks))
    means = [attribution.matched_means([boots[number] for boots in arms]) for number in range(len(blocks))]
    named = {"interval": "interval_ns", **{part: part for part in attribution.PARTS}}
    values = {name: [[each[part] for each in block] for block in means] for name, part in named.items()}
    step = {name: _part(each, values["interval"], alpha) for name, each in values.items()}
    before, *after = design.arms_with_plant(manifest.plant_ns)
    return Explained(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        device=manifest.descriptions[design.arms[0].name].device["kind"],
        variant=design.name,
        before=comparison.settings(before),
        after=comparison.settings(after[0]) if after else None,
        blocks=len(blocks),
        confidence=1 - alpha,
        intervals={arm.name: sum(map(len, boots)) for arm, boots in zip(design.arms, arms, strict=True)},
        device_holds=" and ".join(dict.fromkeys(filter(None, (arm.device_holds for arm in design.arms)))),
        step_us=step,
        ranks=[times for arm in design.arms for times in rank_times(arm, blocks)],
        tail=tails(design.arms, blocks),
        prediction=predicted(manifest, blocks) if after else None,
        warnings=warnings(step),
    )


def of_boot(block: Block, arm: Arm, folder: Path) -> pd.DataFrame:
    """attribution.attribute of one boot. Raises BadSetting where it has nothing to attribute."""
    steps, work = block.of(arm.name, "steps"), block.of(arm.name, "work")
    where = f"{folder}, block {block.number}, arm {arm.name}"
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
        raise api.BadSetting("in some block the arms have no batch size in common, so no step to compare")
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
        share_before=share,
        share_after=effect.after / float(steps[1].mean()),
    )


def rank_times(arm: Arm, blocks: Sequence[Block]) -> list[RankTimes]:
    """Of each of the arm's ranks; none where it has one."""
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


def predicted(manifest: Manifest, blocks: Sequence[Block]) -> Prediction | NoPrediction | None:
    """The prediction as `bench run` prints it."""
    per_block = [block_values(manifest.design, block) for block in blocks]
    return comparison.comparison(manifest, blocks, per_block).prediction


def warnings(step: Mapping[str, Part]) -> list[Warning]:
    """What a reader must know before believing the table."""
    rest = step["unattributed"]
    return [
        Warning(
            "unattributed",
            f"{share:.1%} of the {side} arm's step is unattributed: code between two phases, or somebody "
            "else on the host's core",
        )
        for side, share in (("before", rest.share_before), ("after", rest.share_after))
        if share is not None and share > MOST_UNATTRIBUTED
    ]
