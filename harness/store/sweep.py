"""sweep.json, and the runs in a sweep's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from overlap_bench.harness.common import machine, names
from overlap_bench.harness.common.machine import Code, Machine
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.grid import Axis, Point
from overlap_bench.harness.store.files import SCHEMA_VERSION, SWEEP_FILE, StoreError, read_json
from overlap_bench.harness.store.manifest import Manifest, as_sized, read_manifest


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """sweep.json, written before the first point; `machine`, `code` and `versions` as in a run's manifest."""

    schema_version: int
    sweep: str  # the folder's name
    created: str
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    machine: Machine
    code: Code
    versions: dict[str, str]
    signature: str = ""  # of all its designs; see store/trust.py

    @property
    def designs(self) -> list[Design]:
        return [point.design for point in self.points]


# ---------------------------------------------------------------------------------------------------------
# What is on disk


def read(folder: Path) -> Sweep:
    """Raises StoreError for a folder that is no sweep, or whose file is damaged or newer."""
    return read_json(folder / SWEEP_FILE, Sweep, "a sweep folder")


def runs_in(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The runs in a sweep's folder, finished or not, the oldest first."""
    for inside in sorted(folder.iterdir()):
        if (inside / "manifest.json").exists():
            yield inside, read_manifest(inside)


def run_of(point: Point, runs: Sequence[tuple[Path, Manifest]]) -> tuple[Path, Manifest] | None:
    """The run of a point, whether it is finished or not."""
    designs = ((each, each[1].design) for each in runs)
    return next((each for each, found in designs if found == as_sized(point.design, found)), None)


def is_done(run: Path) -> bool:
    return (run / "summary.json").exists()


def check_resume(stored: Sweep, now: Sweep) -> None:
    """Raises StoreError, naming the difference, unless `now` is the same commit, points and machine."""
    for what in ("code", "points", "machine", "versions"):
        if found := names.difference(getattr(stored, what), getattr(now, what), what):
            raise StoreError(f"can't resume {stored.sweep}: {found}; start a fresh sweep")


def described_here(axes: tuple[Axis, ...], points: tuple[Point, ...], name: str, now: datetime) -> Sweep:
    return Sweep(
        schema_version=SCHEMA_VERSION,
        sweep=name,
        created=now.isoformat(timespec="seconds"),
        axes=axes,
        points=points,
        machine=machine.fingerprint(),
        code=machine.code(),
        versions=machine.versions(),
    )
