"""One `bench run` from its design to its result: a folder, the blocks in it, the object that is printed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from engines.api import BadSetting
from harness import divergences, floors, gate, machine, runner, store, teacher_forcing
from harness.block import Block
from harness.comparison import (
    Values,
    block_values,
    check_metrics,
    check_values,
    reason_to_stop,
    result,
)
from harness.design import Design, orders
from harness.store import Manifest

Display = Callable[[Path, Design], AbstractContextManager[runner.Observer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `outputs_differ`: tokens differ between the arms of engines that promise equal ones, or
    differ where no near-tie explains it (divergences.py)."""

    result: dict[str, Any]
    outputs_differ: bool
    folder: Path


def measure(design: Design, results: Path, display: Display) -> Outcome:
    """A fresh run in a new folder under `results`.

    Raises as `runner.run` does, and StoreError. A run that ends before its first block is finished leaves
    no folder; after that the error's note says how to go on.
    """
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = store.create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now, lot=folder.name)
        store.write_manifest(folder, manifest)
        with store.held(folder):
            return _finish(folder, manifest, display)
    finally:
        store.discard_if_empty(folder)


def resume(folder: Path, design: Design | None, display: Display) -> Outcome:
    """Go on with a stored run; `design` None: as it was asked for. Raises StoreError where the
    commit, the settings, the machine or the versions are others."""
    stored = store.read_manifest(folder)
    now = described_here(design or stored.design, stored.run, datetime.now().astimezone(), stored.run)
    store.check_resume(stored, now)
    with store.held(folder):
        return _finish(folder, stored, display)


def _finish(folder: Path, manifest: Manifest, display: Display) -> Outcome:
    """Run the blocks that are missing, read all back, and store the summary."""
    design = manifest.design
    try:
        with display(folder, design) as observe:
            manifest, done = runner.run(folder, manifest, observe, _rule(folder, design))
            teacher_forcing.judge(folder, manifest, lambda line: observe(runner.Said(line)))
    except BaseException as error:
        kept = len(store.finished_blocks(folder))
        if kept:
            most = "at most " if design.until is not None else ""
            again = f"go on with {manifest.resumed_by} --resume {folder}"
            error.add_note(f"{kept} of {most}{design.blocks} blocks are kept, {again}")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note("no block was done, so nothing is kept")
        raise
    blocks = [Block(number, store.read_block(folder, number)) for number in range(done)]
    summary = with_floor(result(manifest, blocks), manifest, floors.folder_of(folder))
    store.write_summary(folder, summary)
    return Outcome(summary, outputs_differ(manifest, summary), folder)


def outputs_differ(manifest: Manifest, summary: Mapping[str, Any]) -> bool:
    """Whether outputs that must be equal differ."""
    promised = manifest.promises_outputs
    return any(divergences.fails(each["outputs"], promised) for each in summary["comparisons"])


def differences_from(manifest: Manifest) -> list[str]:
    """How here and now differ from where and when a run was measured; a rerun tells."""
    now = described_here(manifest.design, manifest.run, datetime.now().astimezone(), manifest.run)
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("commit", manifest.code, now.code),
        ("machine", manifest.machine, now.machine),
        ("versions", manifest.versions, now.versions),
    )
    return [
        f"different {what}: {found}"
        for what, old, new in pairs
        if (found := store.difference(msgspec.to_builtins(old), msgspec.to_builtins(new)))
    ]


def with_floor(summary: dict[str, Any], manifest: Manifest, folder: Path) -> dict[str, Any]:
    """The result with the noise floor beside it; an A/A run measures that, and keeps it in `folder`."""
    design, comparison = manifest.design, summary["comparisons"][0]
    if design.against_itself and design.plant is None and comparison["blocks"] > 1:
        floor = floors.floor_of(manifest, comparison)
        floors.keep(folder, floor)
        values = floors.at_level(floor, comparison["blocks"], 1 - comparison["confidence"])
        shown = floors.Shown(values, ())
        return {**summary, "comparisons": [floors.beside(comparison, shown)]}
    return floors.beside_known(summary, manifest, folder)


def _rule(folder: Path, design: Design) -> runner.Enough:
    """Whether the declared rule stops the run; each block is read back once. Raises EngineError for a metric
    that the first block can't give, rather than once all are done."""
    values: list[Values] = []

    def enough(done: int) -> bool:
        if design.until is None and done > 1:
            return False
        for number in range(len(values), done):
            values.append(block_values(design, Block(number, store.read_block(folder, number))))
        check_values(design, values, gate.gated(design))
        return design.until is not None and reason_to_stop(design, values) is not None

    return enough


def described_here(design: Design, run: str, now: datetime, lot: str) -> Manifest:
    """The manifest of a run that starts here and now; `lot` is what the order of its arms is drawn by."""
    arms = len(design.arms)
    drawn = [orders(lot, block, arms) for block in range(design.blocks)]
    return Manifest(
        schema_version=store.SCHEMA_VERSION,
        run=run,
        created=now.isoformat(timespec="seconds"),
        design=design,
        after_first=[arms > 1 and order.index(1) < order.index(0) for order in drawn],
        orders=drawn if arms > 2 else [],
        machine=machine.fingerprint(),
        code=machine.code(),
        versions=machine.versions(),
        files={path: digest(path) for path in design.workload.files},
    )


def digest(path: str) -> str:
    """BLAKE2b-128 of a file, hexadecimal. Raises BadSetting where it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise BadSetting(f"cannot read {path}: {error.strerror}") from None
