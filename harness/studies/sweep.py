"""`bench sweep`: the points of a grid measured one after the other, and what they found as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from engines import api
from harness.common.machine import guess_device
from harness.plan import checks, grid
from harness.plan.grid import Axis, Point
from harness.plan.request import Request
from harness.plan.settings import spelled
from harness.plan.variants import load_variants
from harness.run.blocks import measure as measure_blocks
from harness.store import sweep, tables, trust
from harness.store.files import SWEEP_FILE, create_within, write_json
from harness.store.folders import create, discard
from harness.store.sweep import Sweep
from harness.store.trust import Admit
from harness.studies import measure as measure_
from harness.studies.measure import Display, Source

Say = Callable[[str], None]


def measure(
    request: Request,
    over: Sequence[str],
    resume: Path | None,
    out: Path,
    say: Say,
    admit: Admit,
    display: Display,
    source: Source = measure_blocks,
) -> Path:
    """Measure every point that is not measured yet; the folder. Raises as measure.measure and `admit` do, and
    every finished point is kept; a sweep that ends before its first block leaves no folder."""
    axes: tuple[Axis, ...] = ()
    points: tuple[Point, ...] = ()
    if resume is not None and (over or not request.nothing) and not (request.variant or request.engine):
        raise api.BadSetting("--resume goes on with a sweep as it was asked for: leave the other options out")
    if resume is None or over or not request.nothing:
        axes = grid.parse_axes(over)
        if not axes:
            raise api.BadSetting("say what to sweep: --over concurrency=1,8,32; once for each setting")
        points = grid.make_points(request, axes, api.find_engines(), load_variants(), guess_device)

    for point in points:
        checks.check_metrics(point.design)
    if resume is not None:
        stored = sweep.read(resume)
        made_here = bool(points) or admit(resume, stored.designs, stored.signature)
        check_resume(stored, axes, points)
        _measure_all(resume, stored, say, display, admit, source, made_here)
        return resume
    now = datetime.now().astimezone()
    folder = create(out, "-".join(["sweep", *(axis.name for axis in axes)]), now)
    planned = sweep.described_here(axes, points, folder.name, now)
    planned = msgspec.structs.replace(planned, signature=trust.signature(planned.designs))
    try:
        write_json(folder / SWEEP_FILE, planned)
        _measure_all(folder, planned, say, display, admit, source)
    finally:
        if not _kept(folder):
            discard(folder)
    return folder


def _kept(folder: Path) -> bool:
    """Whether a sweep has a finished block."""
    return any(tables.finished_blocks(run) for run, _ in sweep.runs_in(folder))


def check_resume(stored: Sweep, axes: tuple[Axis, ...], points: tuple[Point, ...]) -> None:
    """Raises StoreError unless it can be gone on with here, and is what was asked for, if anything was."""
    now = sweep.described_here(
        axes or stored.axes, points or stored.points, stored.sweep, datetime.now().astimezone()
    )
    sweep.check_resume(stored, now)


def _measure_all(
    folder: Path,
    planned: Sweep,
    say: Say,
    display: Display,
    admit: Admit,
    source: Source,
    made_here: bool = True,
) -> None:
    count = len(planned.points)
    say(f"sweeping {count} points into {folder}")
    for number, point in enumerate(planned.points):
        found = sweep.run_of(point, list(sweep.runs_in(folder)))
        if found is not None and sweep.is_done(found[0]):
            continue
        say(f"point {number + 1} of {count}: {spelled(point.at)}")
        try:
            if found is None:
                measure_.measure(point.design, folder, display, create_within, made_here, source)
            else:
                measure_.resume(found[0], point.design, display, admit, source)
        except BaseException as error:
            error.__notes__ = []  # they say how to go on with the point's run alone
            if _kept(folder):
                error.add_note(f"{number} of {count} points are done, go on with --resume {folder}")
            raise
