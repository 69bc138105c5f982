"""One `bench run` from its design to its result: a folder, the blocks in it, the object that is printed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import machine, runner, store
from harness.comparison import Block, check_metrics, result
from harness.design import Design, order
from harness.store import Manifest

Opened = Callable[[Path], None]


def measure(design: Design, results: Path, opened: Opened, observe: runner.Observer) -> dict[str, Any]:
    """A fresh run. `opened` is told the run's folder before anything boots. A run that ends before its first
    block is finished leaves no folder. Raises as `runner.run` does, and StoreError."""
    check_metrics(design)
    now = datetime.now().astimezone()
    folder = store.create(results, design.name, now)
    try:
        manifest = described_here(design, folder.name, now)
        store.write_manifest(folder, manifest)
        opened(folder)
        return finish(folder, manifest, observe)
    finally:
        store.discard_if_empty(folder)


def resume(
    folder: Path, design: Design | None, opened: Opened, observe: runner.Observer
) -> tuple[dict[str, Any], Design]:
    """Go on with a stored run; `design` None: with what it was told to be. Raises StoreError where the
    commit, the settings or the machine are others."""
    stored = store.read_manifest(folder)
    now = described_here(design or stored.design, stored.run, datetime.now().astimezone())
    store.check_resume(stored, now)
    check_metrics(stored.design)
    opened(folder)
    return finish(folder, stored, observe), stored.design


def finish(folder: Path, manifest: Manifest, observe: runner.Observer) -> dict[str, Any]:
    """Run the blocks that are missing, read all back, and store the summary."""
    manifest = runner.run(folder, manifest, observe)
    blocks = [Block(number, store.read_block(folder, number)) for number in range(manifest.design.blocks)]
    summary = result(manifest, blocks)
    store.write_summary(folder, summary)
    return summary


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
    )
