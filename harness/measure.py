"""One `bench run` from its design to its result: a folder, the blocks in it, the object that is printed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engines.api import BadSetting
from harness import machine, runner, store
from harness.comparison import Block, check_metrics, result
from harness.design import Design, order
from harness.store import Manifest

Display = Callable[[Path, Design], AbstractContextManager[runner.Observer]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `outputs_differ`: tokens differ between the arms of engines that promise equal ones."""

    result: dict[str, Any]
    outputs_differ: bool


def measure(design: Design, results: Path, display: Display) -> Outcome:
    """A fresh run in a new folder under `results`.

    Raises as `runner.run` does, and StoreError. A run that ends before its first block is finished leaves
    no folder; after that the error's note says how to go on.
    """
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = store.create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now)
        store.write_manifest(folder, manifest)
        return _finish(folder, manifest, display)
    finally:
        store.discard_if_empty(folder)


def resume(folder: Path, design: Design | None, display: Display) -> Outcome:
    """Go on with a stored run; `design` None: with what it was told to be. Raises StoreError where the
    commit, the settings, the machine or the versions are others."""
    stored = store.read_manifest(folder)
    now = described_here(design or stored.design, stored.run, datetime.now().astimezone())
    store.check_resume(stored, now)
    return _finish(folder, stored, display)


def _finish(folder: Path, manifest: Manifest, display: Display) -> Outcome:
    """Run the blocks that are missing, read all back, and store the summary."""
    try:
        with display(folder, manifest.design) as observe:
            manifest = runner.run(folder, manifest, observe)
    except BaseException as error:
        kept = len(store.finished_blocks(folder))
        if kept:
            error.add_note(
                f"{kept} of {manifest.design.blocks} blocks are kept, go on with --resume {folder}"
            )
        raise
    blocks = [Block(number, store.read_block(folder, number)) for number in range(manifest.design.blocks)]
    summary = result(manifest, blocks)
    store.write_summary(folder, summary)
    promised = all(each.deterministic for each in manifest.descriptions.values())
    outputs = summary["comparisons"][0]["outputs"]
    return Outcome(summary, promised and outputs["identical"] < outputs["compared"])


def described_here(design: Design, run: str, now: datetime) -> Manifest:
    """The manifest of a run that starts here and now."""
    return Manifest(
        schema_version=store.SCHEMA_VERSION,
        run=run,
        created=now.isoformat(timespec="seconds"),
        design=design,
        after_first=[order(design.seed, block) for block in range(design.blocks)],
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
