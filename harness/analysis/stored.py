"""A stored run, read back and analysed as it was when it was measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, decision, noise_floor
from overlap_bench.harness.analysis import values as values_
from overlap_bench.harness.analysis.plain import Found, from_plain
from overlap_bench.harness.analysis.result import Comparison, Result
from overlap_bench.harness.analysis.values import reason_to_stop
from overlap_bench.harness.analysis.verdict_warnings import Unfinished
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.files import SUMMARY_FILE, StoreError, floors_of, read_summary
from overlap_bench.harness.store.manifest import Manifest, check_whole, read_manifest
from overlap_bench.harness.store.tables import Block


def readable(folder: Path) -> Manifest:
    """The manifest of a run that has at least one block, or had. Raises StoreError."""
    manifest = read_manifest(folder)
    measured = tables.finished_blocks(folder) and manifest.descriptions
    if not measured and not manifest.left_out:
        raise StoreError(
            f"{folder} has no finished trial; go on with {manifest.resumed_by} --resume {folder}"
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


def read_blocks(folder: Path, design: Design) -> Iterator[tuple[Block, Values]]:
    """Each complete block, whether or not its run is finished, and its values. Raises StoreError."""
    for number in tables.finished_blocks(folder):
        block = read_block(folder, number, design)
        yield block, values_.block_values(design, block)


def finished(
    folder: Path, manifest: Manifest, read: Iterable[tuple[Block, Values]] | None = None
) -> tuple[list[Block], list[Values]]:
    """The blocks that count, all up to where the run's own rule ended it, and the values of each. `read`:
    what `read_blocks` gave, if the caller has it already. Raises StoreError for a run that did not get that
    far, and for one whose blocks are not whole."""
    check_whole(folder, manifest)
    design = manifest.design
    blocks: list[Block] = []
    values: list[Values] = []
    remedy = f"go on with {manifest.resumed_by} --resume {folder}"
    for block, block_values in read_blocks(folder, design) if read is None else read:
        if block.number != len(blocks):
            raise StoreError(f"{folder} lacks trial {len(blocks)}; {remedy}")
        blocks.append(block)
        values.append(block_values)
        if reason_to_stop(design, values) is not None or len(blocks) == manifest.blocks_in_time:
            return blocks, values
    most = "at most " if design.may_end_early else ""
    raise StoreError(
        f"{folder} is not finished: {len(blocks)} of {most}{design.blocks} trials, and a verdict now would "
        f"be peeking; {remedy}"
    )


def result(folder: Path, manifest: Manifest, read: Iterable[tuple[Block, Values]] | None = None) -> Result:
    """What the run printed, made again from the blocks, or as it was stored where those are not whole. `read`
    as of `finished`. Raises StoreError for a run that is not finished."""
    if manifest.left_out:
        found = summary(folder, Result)
        if len(found.comparisons) != max(1, len(manifest.design.arms) - 1) or any(
            not {each.primary, *each.limit} <= each.metrics.keys() for each in found.comparisons
        ):
            raise StoreError(f"{folder / SUMMARY_FILE} was edited: it does not have what its run compares")
        return found
    blocks, per_block = finished(folder, manifest, read)
    found = comparison.result(manifest, blocks, per_block)
    return noise_floor.beside_known(found, manifest, floors_of(folder))


def so_far(folder: Path, manifest: Manifest) -> Result | None:
    """What the blocks of a run that is not finished show, in their order, without a verdict: one now would be
    peeking. None of fewer than two, which have no interval."""
    # On a cluster, a later block may come first: it waits for those before it.
    read = [
        (block, values)
        for place, (block, values) in enumerate(read_blocks(folder, manifest.design))
        if block.number == place
    ]
    if len(read) < 2 or not manifest.descriptions:
        return None
    blocks, per_block = zip(*read, strict=True)
    found_now = comparison.result(manifest, blocks, per_block)
    return msgspec.structs.replace(
        found_now, comparisons=[_unjudged(each, manifest.design) for each in found_now.comparisons]
    )


def _unjudged(found: Comparison, design: Design) -> Comparison:
    rows = {name: msgspec.structs.replace(row, verdict=None) for name, row in found.metrics.items()}
    most = "at most " if design.may_end_early else ""
    told = Unfinished(found.blocks + len(found.left_out), f"{most}{design.blocks}")
    others = [each for each in found.warnings if not each.settles]
    return msgspec.structs.replace(
        found, metrics=rows, verdict=decision.NOT_FINISHED, warnings=[told, *others]
    )


def summary(folder: Path, kind: type[Found]) -> Found:
    """What a folder's summary.json says was found. Raises StoreError."""
    return as_found(folder / SUMMARY_FILE, read_summary(folder), kind)


def as_found(path: Path, plain: dict[str, Any], kind: type[Found]) -> Found:
    """What a file says was found. Raises StoreError."""
    try:
        return from_plain(plain, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise StoreError(f"{path} is damaged or was edited: {error}") from error


def read_block(folder: Path, number: int, design: Design) -> Block:
    """A block in which every arm has its rows. Raises StoreError."""
    block = Block(number, tables.read_block(folder, number))
    rounds = block.tables["rounds"]  # of an import, with what its file told
    aggregates = any(rounds[name].notna().any() for name in rounds if name.startswith(definitions.TOLD))
    for arm in design.arms:
        for table in tables.NEEDED:
            if not len(block.of(arm.name, table)) and not (aggregates and table == "requests"):
                raise StoreError(
                    f"{tables.table_path(folder, number, table)} was edited: it has no row of {arm.name}"
                )
    return block
