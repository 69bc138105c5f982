"""Stored runs set against each other: `bench compare`.

Two arms of one run were interleaved, so they are compared as that run compares them. Arms of two runs were
not: whatever the machine did in between is part of the change. So they are described, by Welch's interval and
with a warning, and get no verdict.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engines import api
from harness import cautions, comparison, divergences, floors, metrics, outputs, stats, store
from harness.block import Block
from harness.design import ALPHA, Arm, Design
from harness.mechanism import mechanism
from harness.store import NOT_RECORDED, Manifest

if TYPE_CHECKING:
    import pandas as pd

SIDES = ("before", "after")
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

    def same_run(self, other: Side) -> bool:
        """However the two folders were written: a relative path and an absolute one are the same run."""
        return self.folder.resolve() == other.folder.resolve()


@dataclass(frozen=True, slots=True)
class Compared:
    """`outputs_differ`: as in measure.Outcome."""

    result: dict[str, Any]
    outputs_differ: bool


def compare(texts: Sequence[str]) -> Compared:
    """The first arm against each of the others. Raises BadSetting where they can't be compared, and
    StoreError where a folder can't be read."""
    sides = find_sides(texts)
    first, *others = sides
    for left, right in combinations(sides, 2):
        if not left.same_run(right):
            check_comparable(left, right)
    comparisons = [
        _interleaved(first, other) if first.same_run(other) else _apart(first, other) for other in others
    ]
    promised = all(side.manifest.promises_outputs for side in sides)
    differ = any(divergences.fails(each["outputs"], promised) for each in comparisons)
    result = {
        "schema_version": store.SCHEMA_VERSION,
        "run": ", ".join(side.label for side in sides),
        "device": first.description.device["kind"],
        "stopped_because": "stored runs were compared, nothing was measured",
        "comparisons": comparisons,
    }
    return Compared(result, differ)


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


def readable(folder: Path) -> Manifest:
    """The manifest of a run that has at least one block. Raises StoreError."""
    manifest = store.read_manifest(folder)
    if not store.finished_blocks(folder) or not manifest.descriptions:
        raise store.StoreError(
            f"{folder} has no finished block; go on with {manifest.resumed_by} --resume {folder}"
        )
    return manifest


def check_two(folder: Path, manifest: Manifest) -> None:
    """Raises BadSetting for a run of more than two arms, where a before and an after are wanted."""
    first, *others = (arm.name for arm in manifest.design.arms)
    if len(others) > 1:
        sides = (shlex.quote(f"{folder}:{name}") for name in (first, others[0]))
        raise api.BadSetting(
            f"{folder} has {1 + len(others)} arms, and this takes a before and an after; for any two of "
            f"{', '.join((first, *others))} use bench compare {' '.join(sides)}"
        )


def check_comparable(left: Side, right: Side) -> None:
    """Raises BadSetting, naming the first difference that makes a comparison of two runs meaningless. What an
    imported run did not record counts as equal to anything."""
    same_words = _tool(left) == _tool(right)
    for what, old, new in (
        ("device", left.description.device["kind"], right.description.device["kind"]),
        ("device", left.description.device["name"], right.description.device["name"]),
        ("model", left.description.model["name"], right.description.model["name"]),
        ("workload", _asked(left), _asked(right) if same_words else _asked(left)),
        ("workload's data", _data(left), _data(right)),
    ):
        found = "" if NOT_RECORDED in (old, new) else store.difference(old, new)
        if found:
            raise api.BadSetting(
                f"{left.label} and {right.label} can't be compared: their {what} differs: {found.strip()}"
            )


def _tool(side: Side) -> str:
    """Who measured it: "" for this program."""
    return "" if side.manifest.imported is None else side.manifest.imported.tool


def _asked(side: Side) -> Any:
    """The workload, in the words of who measured it."""
    imported = side.manifest.imported
    return msgspec.to_builtins(side.manifest.design.workload) if imported is None else imported.asked


def _data(side: Side) -> Any:
    """A digest of each file that the workload is made of; an import's are only the files it was read from."""
    return side.manifest.files if side.manifest.imported is None else NOT_RECORDED


# ---------------------------------------------------------------------------------------------------------
# Two arms of one run


def read_blocks(folder: Path, design: Design) -> Iterator[tuple[Block, comparison.Values]]:
    """Each complete block, whether or not its run is finished, and its values. Raises StoreError."""
    for number in store.finished_blocks(folder):
        block = read_block(folder, number, design)
        yield block, comparison.block_values(design, block)


def finished(
    folder: Path, manifest: Manifest, read: Iterable[tuple[Block, comparison.Values]] | None = None
) -> tuple[list[Block], list[comparison.Values]]:
    """The blocks that count, all up to where the run's own rule ended it, and the values of each. `read`:
    what `read_blocks` gave, if the caller has it already. Raises StoreError for a run that did not get that
    far."""
    design = manifest.design
    blocks: list[Block] = []
    values: list[comparison.Values] = []
    remedy = f"go on with {manifest.resumed_by} --resume {folder}"
    for block, block_values in read_blocks(folder, design) if read is None else read:
        if block.number != len(blocks):
            raise store.StoreError(f"{folder} lacks block {len(blocks)}; {remedy}")
        blocks.append(block)
        values.append(block_values)
        if comparison.reason_to_stop(design, values) is not None:
            return blocks, values
    most = "at most " if design.until is not None else ""
    raise store.StoreError(
        f"{folder} is not finished: {len(blocks)} of {most}{design.blocks} blocks, and a verdict now would "
        f"be peeking; {remedy}"
    )


def result(
    folder: Path, manifest: Manifest, read: Iterable[tuple[Block, comparison.Values]] | None = None
) -> dict[str, Any]:
    """The object that `bench run --format json` printed, made again from the blocks. `read` as of `finished`.
    Raises StoreError for a run that is not finished."""
    blocks, per_block = finished(folder, manifest, read)
    summary = comparison.result(manifest, blocks, per_block)
    return floors.beside_known(summary, manifest, floors.folder_of(folder))


def read_block(folder: Path, number: int, design: Design) -> Block:
    """A block in which every arm has its rows. Raises StoreError."""
    block = Block(number, store.read_block(folder, number))
    aggregates = any(name.startswith(metrics.TOLD) for name in block.tables["rounds"])  # an imported run's
    for arm in design.arms:
        for table in store.NEEDED:
            if not len(block.of(arm.name, table)) and not (aggregates and table == "requests"):
                raise store.StoreError(
                    f"{store.table_path(folder, number, table)} was edited: it has no row of {arm.name}"
                )
    return block


def _interleaved(left: Side, right: Side) -> dict[str, Any]:
    """Two arms of one run. A pair that the run itself compares gets that comparison, with verdicts adjusted
    for the number of arms and with the noise floor. Two arms the other way round are judged too. Any other
    pair of several was picked by whoever asks, perhaps from many, so it is described, not judged."""
    manifest, (before, after) = left.manifest, (left.arm.name, right.arm.name)
    first, *others = (arm.name for arm in manifest.design.arms)
    if before == first:
        own: dict[str, Any] = result(left.folder, manifest)["comparisons"][others.index(after)]
        return own
    blocks, _ = finished(left.folder, manifest)
    found = comparison.of_pair(manifest, blocks, before, after)
    if len(others) == 1:
        return found
    rows = {name: {**row, "p_adjusted": None, "verdict": None} for name, row in found["metrics"].items()}
    said = f"described, not judged: the run compares its arms with {first}, and not {after} with {before}"
    return {**found, "metrics": rows, "warnings": [said, *found["warnings"]]}


# ---------------------------------------------------------------------------------------------------------
# Arms of two runs


def _apart(left: Side, right: Side) -> dict[str, Any]:
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
    goods = [side.manifest.design.goodput for side in (left, right)]
    told = _values(read, goods[0] if goods[0] == goods[1] else {})
    values = {name: per_arm for name, per_arm in told.items() if SIDES[0] in per_arm}
    primary = _primary_of_both(design.primary, values)
    same_prompts = left.manifest.design.seed == right.manifest.design.seed and not (
        _tool(left) or _tool(right)
    )
    limits = {name: values[name] for name in ("device_busy", "exposed_host_us") if name in values}
    before, after = (
        side.manifest.design.arms_with_plant(side.manifest.plant_ns)[
            side.manifest.design.arms.index(side.arm)
        ]
        for side in (left, right)
    )
    return {
        "variant": design.name,
        "before": comparison.settings(before),
        "after": comparison.settings(after),
        "blocks": min(map(len, read.values())),
        "confidence": 1 - ALPHA,
        "margin": design.margin,
        "primary": primary,
        "metrics": {name: _row(name, per_arm) for name, per_arm in values.items()},
        "outputs": outputs.same(manifest, blocks) if same_prompts else outputs.NONE_COMPARED,
        "failures": outputs.failures(design, blocks),
        "mechanism": mechanism(design, blocks),
        "limit": {
            name: {side: float(np.mean(per_arm[side])) if side in per_arm else None for side in SIDES}
            for name, per_arm in limits.items()
        },
        "prediction": {"none": "the arms are of different runs"},
        "warnings": [
            *_warnings(left, right),
            *_uneven(sides, read),
            *_in_place_of(design.primary, primary, sides, told),
            *cautions.circumstances(manifest, blocks, values),
        ],
    }


def _uneven(sides: Mapping[str, Side], read: Mapping[str, Sequence[Block]]) -> list[str]:
    """A warning where the sides differ in blocks: the headline gives one number, the smaller."""
    counts = [len(blocks) for blocks in read.values()]
    if len(set(counts)) == 1:
        return []
    each = zip(sides.values(), counts, strict=True)
    return [f"numbers of blocks differ: {', '.join(f'{side.label} has {count}' for side, count in each)}"]


def _primary_of_both(primary: str, values: Series) -> str:
    """The primary, or where the two sides do not share it one that they do. Raises EngineError."""
    both = [name for name, per_arm in values.items() if len(per_arm) == 2]
    if not both:
        raise api.EngineError("these runs have no metric with a value in every block of both")
    return next(name for name in (primary, *INSTEAD, *both) if name in both)


def _in_place_of(primary: str, shared: str, sides: Mapping[str, Side], told: Series) -> list[str]:
    """Which metric is compared in place of the primary, and why; empty where the primary itself is."""
    if shared == primary:
        return []
    before, after = (side.manifest.design.goodput for side in sides.values())
    if primary in metrics.MATCHED:
        why = "it needs both arms in one block"
    elif primary == "goodput_req_s" and before != after:
        why = f"the --goodput limits differ, {store.difference(before, after)}"
    else:
        lacking = [side.label for name, side in sides.items() if name not in told.get(primary, {})]
        why = f"it has no value in some block of {' and '.join(lacking)}"
    return [f"{shared} is compared in place of {primary}: {why}"]


def _own_blocks(name: str, side: Side) -> list[Block]:
    """A side's blocks, reduced to its arm, under the arm's new name. Where a file held only aggregates, the
    table of requests is empty but keeps its columns."""
    found = []
    for number in store.finished_blocks(side.folder):
        block = read_block(side.folder, number, side.manifest.design)
        own = {table: block.of(side.arm.name, table) for table in store.TABLES if table != "divergences"}
        found.append(
            Block(
                number,
                {
                    table: frame.assign(arm=name)
                    for table, frame in own.items()
                    if len(frame) or table == "requests"
                },
            )
        )
    return found


def _side_by_side(sides: Sequence[Sequence[Block]]) -> list[Block]:
    """Blocks of the same number, joined. A number determines the seeds, and says nothing about the time."""
    import pandas as pd

    joined = []
    for number in sorted({block.number for blocks in sides for block in blocks}):
        parts = [block for blocks in sides for block in blocks if block.number == number]
        tables: dict[str, pd.DataFrame] = {}
        for table in store.TABLES:
            frames = [block.tables[table] for block in parts if table in block.tables]
            tables[table] = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        joined.append(Block(number, tables))
    return joined


def _values(read: Mapping[str, Sequence[Block]], goodput: Mapping[str, float]) -> Series:
    """Like comparison.measured, but with what only one side has; the two may have different numbers of
    blocks. No metrics.MATCHED: they take two arms of one block."""
    import pandas as pd

    found: dict[str, list[dict[str, float]]] = {side: [] for side in read}
    for side, blocks in read.items():
        for block in blocks:
            requests, steps, rounds, work = (
                block.tables.get(name, pd.DataFrame()) for name in ("requests", "steps", "rounds", "work")
            )
            found[side].append(metrics.of_boot(requests, steps, rounds, work, goodput))
    return comparison.series(found, metrics.METRICS)


def _row(name: str, per_arm: dict[str, list[float]]) -> dict[str, Any]:
    if len(per_arm) < 2:
        return comparison.metric_row(name, per_arm["before"], None)
    before, after = per_arm["before"], per_arm["after"]
    return comparison.metric_row(
        name, before, stats.unpaired(before, after, comparison.scale_of(name, before, after))
    )


def _warnings(left: Side, right: Side) -> list[str]:
    lines = [
        f"not interleaved: {left.label} was measured at {_measured(left)}, {right.label} at "
        f"{_measured(right)}. What the machine did in between is part of the change, and no number of "
        "blocks removes it: by simulation, equal arms compared this way differ in 43% of cases where the "
        "machine wanders, not in the 5% claimed. So there is no verdict; bench run measures side by side"
    ]
    for what, old, new in (
        ("machine", left.manifest.machine, right.manifest.machine),
        ("commit", left.manifest.code, right.manifest.code),
    ):
        found = store.difference(msgspec.to_builtins(old), msgspec.to_builtins(new))
        if found:
            lines.append(f"different {what}: {found}")
    found = store.difference(left.manifest.versions, right.manifest.versions)
    if found:
        lines.append(f"different versions: {found}")
    if left.manifest.design.seed != right.manifest.design.seed:
        lines.append("different seeds, so different prompts and arrivals: outputs are not compared")
    return [*lines, *_of_imported(left, right)]


def _measured(side: Side) -> str:
    imported = side.manifest.imported
    if imported is None:
        return side.manifest.created
    return ", ".join(each or "a time that its file does not say" for each in imported.measured)


def _of_imported(left: Side, right: Side) -> list[str]:
    """What a reader must know where another tool measured a side. The lines of the left one itself come with
    the comparison's circumstances, which are made from the left manifest."""
    lines = []
    if _tool(left) != _tool(right):
        tools = " and ".join(_tool(side) or "this program" for side in (left, right))
        lines.append(
            f"measured by {tools}: each client's own time is part of its numbers, and whether the workload "
            "was the same can't be known"
        )
    if right.manifest.imported is not None:
        lines += cautions.of_import(right.label, right.manifest.imported)
    return lines
