"""Stored runs set against each other: `bench compare`.

Two arms of one run were interleaved, so they are compared as that run compares them. Arms of two runs were
not: whatever the machine did in between is part of the change. So they are described, by Welch's interval and
with a warning, and get no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import across_warnings, comparison, decision, outputs
from overlap_bench.harness.analysis.arm_warnings import FromAnotherTool, NotLikeOurs, circumstances
from overlap_bench.harness.analysis.mechanism import limits, mechanism
from overlap_bench.harness.analysis.result import (
    Comparison,
    MetricRow,
    NoPrediction,
    Result,
    Settings,
)
from overlap_bench.harness.analysis.stored import check_two, finished, read_block, readable, result
from overlap_bench.harness.analysis.values import scale_of, series
from overlap_bench.harness.analysis.warnings import Severity, Warning, ranked
from overlap_bench.harness.common.names import difference
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import of_boot
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.files import SCHEMA_VERSION, StoreError
from overlap_bench.harness.store.manifest import NOT_RECORDED, Manifest, check_whole
from overlap_bench.harness.store.tables import TABLES, Block, finished_blocks
from overlap_bench.harness.workload.prompts import ENGLISH

SIDES = ("before", "after")
OF_BOTH_ARMS = ("divergences", "slices")  # tables whose rows mean something beside the other arm's alone
INSTEAD = ("tpot_ms_p50", "latency_ms_p50")  # of a primary that the two runs do not share
Series = dict[str, dict[str, list[float]]]  # metric → side → one value per block


@dataclass(frozen=True, slots=True)
class Side:
    """One arm of one stored run."""

    folder: Path
    manifest: Manifest
    arm: Arm

    @property
    def label(self) -> str:
        return f"{self.manifest.run}:{self.arm.name}"

    @property
    def description(self) -> api.Description:
        return self.manifest.descriptions[self.arm.name]

    @property
    def tool(self) -> str:
        """Who measured it: "" for this program."""
        return "" if self.manifest.imported is None else self.manifest.imported.tool

    def same_run(self, other: Side) -> bool:
        """However the two folders were written: a relative path and an absolute one are the same run."""
        return self.folder.resolve() == other.folder.resolve()


@dataclass(frozen=True, slots=True)
class Compared:
    """`outputs_differ`: as in measure.Outcome."""

    result: Result
    outputs_differ: bool


def compare(texts: Sequence[str]) -> Compared:
    """The first arm against each of the others. Raises BadSetting where they can't be compared, and
    StoreError where a folder can't be read."""
    first, *others = sides = find_sides(texts)
    for side in sides:
        if side.arm.name not in side.manifest.descriptions:
            raise StoreError(f"{side.folder} was edited: it does not say what {side.arm.name} ran on")
    for left, right in combinations(sides, 2):
        if not left.same_run(right):
            check_comparable(left, right)
    comparisons = [
        _interleaved(first, other) if first.same_run(other) else _apart(first, other) for other in others
    ]
    promised = all(side.manifest.promises_outputs for side in sides)
    result = Result(
        schema_version=SCHEMA_VERSION,
        run=", ".join(side.label for side in sides),
        device=first.description.device["kind"],
        stopped_because="stored runs were compared, nothing was measured",
        comparisons=comparisons,
    )
    return Compared(result, any(each.outputs.fail(promised) for each in comparisons))


def find_sides(texts: Sequence[str]) -> list[Side]:
    """Each RUN or RUN:ARM; one run alone stands for its two arms."""
    if len(texts) == 1 and (":" not in texts[0] or Path(texts[0]).is_dir()):
        folder = Path(texts[0])
        manifest = readable(folder)
        check_two(folder, manifest)
        if len(manifest.design.arms) == 2:
            return [Side(folder, manifest, arm) for arm in manifest.design.arms]
    sides = [_side(text) for text in texts]
    if len(sides) < 2:
        raise api.BadSetting("compare needs two arms: RUN RUN, RUN:before RUN:after, or one RUN that has two")
    for left, right in combinations(sides, 2):
        if left.label == right.label and left.same_run(right):
            raise api.BadSetting(f"{left.label} is given twice")
    return sides


def _side(text: str) -> Side:
    folder, name = Path(text), ""
    if not folder.is_dir() and ":" in text:
        before, _, name = text.rpartition(":")
        folder = Path(before)
    manifest = readable(folder)
    arms = {arm.name: arm for arm in manifest.design.arms}
    if not name and len(arms) > 1:
        choices = " or ".join(f"{text}:{each}" for each in arms)
        raise api.BadSetting(f"{text} has {len(arms)} arms: choose {choices}")
    arm: Arm = api.pick(name, arms, f"arm of {folder}") if name else manifest.design.arms[0]
    return Side(folder, manifest, arm)


def check_comparable(left: Side, right: Side) -> None:
    """Raises BadSetting, naming the first difference that makes a comparison of two runs meaningless. What an
    imported run did not record counts as equal to anything."""
    same_words = left.tool == right.tool
    # A server's device is called by the command or the address: no name of a card that would be another.
    served = all(side.arm.is_remote or "cmd" in side.arm.toggles for side in (left, right))
    names = [NOT_RECORDED if served else side.description.device["name"] for side in (left, right)]
    for what, old, new in (
        ("device", left.description.device["kind"], right.description.device["kind"]),
        ("device", *names),
        ("model", left.description.model["name"], right.description.model["name"]),
        ("workload", _asked(left), _asked(right) if same_words else _asked(left)),
        ("workload's data", _data(left, right), _data(right, left)),
    ):
        found = "" if NOT_RECORDED in (old, new) else difference(old, new)
        if found:
            raise api.BadSetting(
                f"{left.label} and {right.label} can't be compared: their {what} differs: {found.strip()}"
            )


def _asked(side: Side) -> Any:
    """The workload, in the words of who measured it."""
    imported = side.manifest.imported
    return msgspec.to_builtins(side.manifest.design.workload) if imported is None else imported.asked


def _data(side: Side, other: Side) -> Any:
    """A digest of each file that the workload is made of; an import's are only the files it was read from.
    An older run has none of the passages of `english`, which then count as equal."""
    if side.manifest.imported is not None:
        return NOT_RECORDED
    known = other.manifest.files
    return {name: told for name, told in side.manifest.files.items() if name != ENGLISH or name in known}


def _interleaved(left: Side, right: Side) -> Comparison:
    """Two arms of one run. A pair that the run itself compares gets that comparison, with verdicts adjusted
    for the number of arms and with the noise floor. Two arms the other way round are judged too. Any other
    pair of several was picked by whoever asks, perhaps from many, so it is described, not judged."""
    manifest, (before, after) = left.manifest, (left.arm.name, right.arm.name)
    first, *others = (arm.name for arm in manifest.design.arms)
    if before == first:
        return result(left.folder, manifest).comparisons[others.index(after)]
    blocks, _ = finished(left.folder, manifest)
    found = comparison.of_pair(manifest, blocks, before, after)
    if len(others) == 1:
        return found
    rows = {
        name: msgspec.structs.replace(row, p_adjusted=None, verdict=None)
        for name, row in found.metrics.items()
    }
    told = across_warnings.NotCompared(first, before, after)
    return msgspec.structs.replace(
        found,
        metrics=rows,
        verdict=decision.NOT_COMPARED,
        warnings=ranked([told, *found.warnings]),
    )


def _apart(left: Side, right: Side) -> Comparison:
    sides = dict(zip(SIDES, (left, right), strict=True))
    read = {name: _own_blocks(name, side) for name, side in sides.items()}
    design = msgspec.structs.replace(
        left.manifest.design,
        name=f"{left.label} against {right.label}, not interleaved",
        arms=tuple(msgspec.structs.replace(side.arm, name=name) for name, side in sides.items()),
        secondaries=(),
        until=None,
        plant=None,
        gate=None,
    )
    manifest = msgspec.structs.replace(
        left.manifest, design=design, descriptions={name: side.description for name, side in sides.items()}
    )
    blocks = _side_by_side(list(read.values()))
    goodput = left.manifest.design.goodput
    told = _values(read, goodput if goodput == right.manifest.design.goodput else {})
    values = {
        name: per_arm
        for name, per_arm in told.items()
        if SIDES[0] in per_arm and (design.splits_steps or name not in definitions.SPLIT)
    }
    primary = _primary_of_both(design.primary, values)
    same_seed = left.manifest.design.seed == right.manifest.design.seed
    return Comparison(
        variant=design.name,
        before=_settings(left),
        after=_settings(right),
        blocks=min(map(len, read.values())),
        confidence=1 - ALPHA,
        margin=design.margin,
        primary=primary,
        metrics={name: _row(name, per_arm) for name, per_arm in values.items()},
        outputs=outputs.same(manifest, blocks)
        if same_seed and not (left.tool or right.tool)
        else outputs.NONE_COMPARED,
        failures=outputs.failures(design, blocks),
        mechanism=mechanism(design, blocks),
        limit=limits(design, values),
        prediction=NoPrediction(none="the arms are of different runs"),
        verdict=decision.NOT_INTERLEAVED,
        warnings=ranked(
            [
                *_warnings(left, right),
                *_uneven(sides, read),
                *_in_place_of(design.primary, primary, sides, told),
                *circumstances(manifest, blocks, values),
            ]
        ),
    )


def _settings(side: Side) -> Settings:
    design = side.manifest.design
    return Settings.of(design.arms_with_plant(side.manifest.plant_ns)[design.arms.index(side.arm)])


def _uneven(sides: Mapping[str, Side], read: Mapping[str, Sequence[Block]]) -> list[Warning]:
    """A warning where the sides differ in blocks: the headline gives one number, the smaller."""
    counts = [len(blocks) for blocks in read.values()]
    if len(set(counts)) == 1:
        return []
    each = zip(sides.values(), counts, strict=True)
    told = ", ".join(f"{side.label} has {count}" for side, count in each)
    return [across_warnings.UnevenTrials(told)]


def _primary_of_both(primary: str, values: Series) -> str:
    """The primary, or where the two sides do not share it one that they do. Raises EngineError."""
    both = [name for name, per_arm in values.items() if len(per_arm) == 2]
    if not both:
        raise api.EngineError("these runs have no metric with a value in every trial of both")
    return next(name for name in (primary, *INSTEAD, *both) if name in both)


def _in_place_of(primary: str, shared: str, sides: Mapping[str, Side], told: Series) -> list[Warning]:
    """Which metric is compared in place of the primary, and why; empty where the primary itself is."""
    if shared == primary:
        return []
    before, after = (side.manifest.design.goodput for side in sides.values())
    if primary in definitions.BETWEEN_ARMS:
        why = "it needs both arms in one trial"
    elif primary == "goodput_req_s" and before != after:
        why = f"the --goodput limits differ, {difference(before, after)}"
    else:
        lacking = [side.label for name, side in sides.items() if name not in told.get(primary, {})]
        why = f"it has no value in some trial of {' and '.join(lacking)}"
    return [across_warnings.InPlaceOf(shared, primary, why)]


def _own_blocks(name: str, side: Side) -> list[Block]:
    """A side's blocks, reduced to its arm, under the arm's new name. Where a file held only aggregates, the
    table of requests is empty but keeps its columns."""
    check_whole(side.folder, side.manifest)
    found = []
    for number in finished_blocks(side.folder):
        block = read_block(side.folder, number, side.manifest.design)
        own = {table: block.of(side.arm.name, table) for table in TABLES if table not in OF_BOTH_ARMS}
        kept = {table: each for table, each in own.items() if len(each) or table == "requests"}
        found.append(Block(number, {table: each.assign(arm=name) for table, each in kept.items()}))
    return found


def _side_by_side(sides: Sequence[Sequence[Block]]) -> list[Block]:
    """Blocks of the same number, joined. A number determines the seeds, and says nothing about the time."""
    joined = []
    for number in sorted({block.number for blocks in sides for block in blocks}):
        parts = [block.tables for blocks in sides for block in blocks if block.number == number]
        tables = {}
        for table in TABLES:
            frames = [part[table] for part in parts if table in part]
            tables[table] = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        joined.append(Block(number, tables))
    return joined


def _values(read: Mapping[str, Sequence[Block]], goodput: Mapping[str, float]) -> Series:
    """Like comparison.measured, but with what only one side has; the two may have different numbers of
    blocks. No metrics.MATCHED: they take two arms of one block."""

    def values_of(block: Block) -> dict[str, float]:
        requests, steps, rounds, work = (
            block.tables.get(name, pd.DataFrame()) for name in ("requests", "steps", "rounds", "work")
        )
        return of_boot(requests, steps, rounds, work, goodput)

    per_arm = {side: list(map(values_of, blocks)) for side, blocks in read.items()}
    return series(per_arm, definitions.METRICS)


def _row(name: str, per_arm: dict[str, list[float]]) -> MetricRow:
    if len(per_arm) < 2:
        return MetricRow.of_metric(name, per_arm["before"], None)
    before, after = per_arm["before"], per_arm["after"]
    return MetricRow.of_metric(name, before, paired.unpaired(before, after, scale_of(name, before, after)))


def _warnings(left: Side, right: Side) -> list[Warning]:
    found: list[Warning] = [
        across_warnings.NotInterleaved(left.label, _measured(left), right.label, _measured(right))
    ]
    one, other = left.manifest, right.manifest
    for what, old, new in (
        ("machine", msgspec.to_builtins(one.measured_on), msgspec.to_builtins(other.measured_on)),
        ("commit", msgspec.to_builtins(one.code), msgspec.to_builtins(other.code)),
        ("versions", one.versions, other.versions),
    ):
        if differing := difference(old, new):
            severity = Severity.QUALIFIES if what == "machine" else Severity.DESCRIBES
            found.append(across_warnings.Different(what, differing, weight=severity))
    if one.design.seed != other.design.seed:
        found.append(across_warnings.OtherSeeds())
    return [*found, *_of_imported(left, right)]


def _measured(side: Side) -> str:
    imported = side.manifest.imported
    if imported is None:
        return side.manifest.created
    return ", ".join(each or "a time that its file does not say" for each in imported.measured)


def _of_imported(left: Side, right: Side) -> list[Warning]:
    """What a reader must know where another tool measured a side. The lines of the left one itself come with
    the comparison's circumstances, which are made from the left manifest."""
    found: list[Warning] = []
    if left.tool != right.tool:
        tools = " and ".join(side.tool or "this program" for side in (left, right))
        found.append(across_warnings.OtherClients(tools))
    if right.manifest.imported is not None:
        told = right.label, right.manifest.imported
        found += [FromAnotherTool.of_import(*told), *NotLikeOurs.of_import(*told)]
    return found
