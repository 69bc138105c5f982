"""`bench sweep`: the points of a grid, measured one after the other, or all at once on a cluster. There the
first block of every point comes first, then the second of every point: all of them show something early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis.values import NoValue
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.plan import grid
from overlap_bench.harness.plan.design import check_metrics
from overlap_bench.harness.plan.grid import Axis, Point
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run.forecast import NoTime
from overlap_bench.harness.store import sweep, tables, trust
from overlap_bench.harness.store.files import SWEEP_FILE, create_within, write_json
from overlap_bench.harness.store.manifest import Run, check_same_data, create, discard, run_of
from overlap_bench.harness.store.sweep import Sweep
from overlap_bench.harness.store.trust import Admit
from overlap_bench.harness.studies import measure as measure_
from overlap_bench.harness.studies.measure import Display, Joined, Steps

Say = Callable[[str], None]
ENDED = object()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where all points are measured at once. `display`: of a point, by its name."""

    joined: Joined
    display: Callable[[str], Display]


def measure(
    request: Request,
    over: Sequence[str],
    resume: Path | None,
    out: Path,
    say: Say,
    admit: Admit,
    display: Display,
    cluster: Cluster | None = None,
) -> Path:
    """Measure every point that is not measured yet, here or on a cluster; the folder. Raises as
    measure.measure and `admit` do, and every finished point is kept; a sweep that ends before its first block
    leaves no folder."""
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
        check_metrics(point.design)
    now = datetime.now().astimezone()
    if resume is not None:
        stored = sweep.read(resume)
        made_here = bool(points) or admit(resume, stored.designs, stored.signature)
        here = sweep.described_here(axes or stored.axes, points or stored.points, stored.sweep, now)
        sweep.check_resume(stored, here)
        for _, manifest in sweep.runs_in(resume):
            check_same_data(manifest)
        _measure_all(resume, stored, say, display, admit, cluster, made_here)
        return resume
    folder = create(out, "-".join(["sweep", *(axis.name for axis in axes)]), now)
    planned = sweep.described_here(axes, points, folder.name, now)
    planned = msgspec.structs.replace(planned, signature=trust.signature(planned.designs))
    try:
        write_json(folder / SWEEP_FILE, planned)
        _measure_all(folder, planned, say, display, admit, cluster)
    finally:
        if not _kept(folder):
            discard(folder)
    return folder


def _kept(folder: Path) -> bool:
    return any(tables.finished_blocks(run) for run, _ in sweep.runs_in(folder))


def _measure_all(
    folder: Path,
    planned: Sweep,
    say: Say,
    display: Display,
    admit: Admit,
    cluster: Cluster | None,
    made_here: bool = True,
) -> None:
    say(f"sweeping {len(planned.points)} points into {folder}")
    if cluster is None:
        _one_by_one(folder, planned, say, display, admit, made_here)
    else:
        _at_once(folder, planned, say, admit, cluster, made_here)


def _missing(folder: Path, planned: Sweep, admit: Admit, made_here: bool) -> Iterator[tuple[int, Point, Run]]:
    """The points that are not done, by number, each with its run, fresh or to be gone on with."""
    stored = list(sweep.runs_in(folder))
    for number, point in enumerate(planned.points):
        found = sweep.run_of(point, stored)
        if found is None or not sweep.is_done(found[0]):
            begun = None if found is None else found[0]
            yield (
                number,
                point,
                run_of(point.design, begun, folder, admit, create=create_within, made_here=made_here),
            )


def _one_by_one(
    folder: Path, planned: Sweep, say: Say, display: Display, admit: Admit, made_here: bool
) -> None:
    count = len(planned.points)
    for number, point, run in _missing(folder, planned, admit, made_here):
        say(f"point {number + 1} of {count}: {spelled(point.at)}")
        try:
            measure_.measure(run, display)
        except BaseException as error:
            if isinstance(error, NoTime | NoValue) and _kept(folder):  # the others may have enough
                say(f"{spelled(point.at)} is left out: {error}")
                continue
            _tell(error, folder, number, count)
            raise


def _at_once(folder: Path, planned: Sweep, say: Say, admit: Admit, cluster: Cluster, made_here: bool) -> None:
    missing = [*_missing(folder, planned, admit, made_here)]
    count, running = len(planned.points), dict[str, Steps]()
    at, done = "", count - len(missing)
    with cluster.joined() as source:
        try:
            for _, point, run in missing:
                at = spelled(point.at)
                running[at] = steps = measure_.in_steps(run, cluster.display(at), source)
                next(steps)
            while running:
                for at, steps in [*running.items()]:
                    if next(steps, ENDED) is ENDED:
                        del running[at]
                        done += 1
                        say(f"{at} is done: {done} of {count} points")
        except BaseException as error:
            _tell(error, folder, done, count)
            if isinstance(error, Exception):
                error.add_note(f"it failed at {at}")
            raise
        finally:
            for steps in running.values():
                steps.close()


def _tell(error: BaseException, folder: Path, done: int, count: int) -> None:
    """How to go on with the sweep, rather than with the run of a point alone."""
    error.__notes__ = []
    if _kept(folder):
        error.add_note(f"{done} of {count} points are done, go on with --resume {folder}")
