"""`bench sweep`: the points of a grid measured one after the other, and what they found as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from engines import api
from harness import store, sweep
from harness.machine import guess_device
from harness.settings import Asked, spelled
from harness.sweep import Axis, Point, Sweep
from harness.variants import load_variants

Say = Callable[[str], None]


def measure(asked: Asked, over: Sequence[str], resume: Path | None, out: Path, say: Say) -> Path:
    """Measure every point that is not measured yet; the folder. Raises as measure.measure does, with every
    finished point kept; a sweep that ends before its first block leaves no folder."""
    axes: tuple[Axis, ...] = ()
    points: tuple[Point, ...] = ()
    if resume is not None and (over or not asked.nothing) and not (asked.variant or asked.engine):
        raise api.BadSetting("--resume goes on with a sweep as it was asked for: leave the other options out")
    if resume is None or over or not asked.nothing:
        axes = sweep.parse_axes(over)
        if not axes:
            raise api.BadSetting("say what to sweep: --over concurrency=1,8,32; once for each setting")
        points = sweep.make_points(asked, axes, api.find_engines(), load_variants(), guess_device)

    from harness import comparison

    for point in points:
        comparison.check_metrics(point.design)
    if resume is not None:
        folder = _go_on(resume, axes, points)
        _measure_all(folder, sweep.read(folder), say)
        return folder
    folder = _begin(out, axes, points)
    try:
        _measure_all(folder, sweep.read(folder), say)
    finally:
        if not _kept(folder):
            store.discard(folder)
    return folder


def _kept(folder: Path) -> bool:
    """Whether a sweep has a finished block."""
    return any(store.finished_blocks(run) for run, _ in sweep.runs_in(folder))


def _begin(out: Path, axes: tuple[Axis, ...], points: tuple[Point, ...]) -> Path:
    now = datetime.now().astimezone()
    folder = store.create(out, "-".join(["sweep", *(axis.name for axis in axes)]), now)
    store.write_json(folder / store.SWEEP_FILE, sweep.described_here(axes, points, folder.name, now))
    return folder


def _go_on(folder: Path, axes: tuple[Axis, ...], points: tuple[Point, ...]) -> Path:
    stored = sweep.read(folder)
    now = sweep.described_here(
        axes or stored.axes, points or stored.points, stored.sweep, datetime.now().astimezone()
    )
    sweep.check_resume(stored, now)
    return folder


def _measure_all(folder: Path, planned: Sweep, say: Say) -> None:
    from harness import measure as runs
    from harness.progress import on_stderr

    count = len(planned.points)
    say(f"sweeping {count} points into {folder}")
    for number, point in enumerate(planned.points):
        found = sweep.run_of(point, list(sweep.runs_in(folder)))
        if found is not None and sweep.is_done(found[0]):
            continue
        say(f"point {number + 1} of {count}: {spelled(point.at)}")
        try:
            if found is None:
                runs.measure(point.design, folder, on_stderr)
            else:
                runs.resume(found[0], point.design, on_stderr)
        except BaseException as error:
            error.__notes__ = []  # they say how to go on with the point's run alone
            if _kept(folder):
                error.add_note(f"{number} of {count} points are done, go on with --resume {folder}")
            raise


def result(folder: Path) -> tuple[dict[str, Any], bool]:
    """The object that `--format json` prints: a comparison for each finished point, with `at` (the value of
    each axis), `run`, its kind of `device`, and `requests` (asked in each round: a closed loop of more places
    has more); above them `device` has every kind. And whether outputs differ that must not. Raises StoreError
    where nothing is finished."""
    from harness import across_runs
    from harness import measure as runs

    planned = sweep.read(folder)
    stored = list(sweep.runs_in(folder))
    comparisons: list[dict[str, Any]] = []
    differ = False
    for point in planned.points:
        found = sweep.run_of(point, stored)
        if found is None or not sweep.is_done(found[0]):
            continue
        summary = across_runs.result(*found)
        differ = differ or runs.outputs_differ(found[1], summary)
        requests = point.design.workload.num_requests
        start = {"at": point.at, "run": found[1].run, "device": summary["device"], "requests": requests}
        comparisons += [{**start, **each} for each in summary["comparisons"]]
    if not comparisons:
        raise store.StoreError(f"{folder} has no finished point; go on with bench sweep --resume {folder}")
    done, most = len({each["run"] for each in comparisons}), len(planned.points)
    return {
        "schema_version": store.SCHEMA_VERSION,
        "run": planned.sweep,
        "device": ", ".join(sorted({each["device"] for each in comparisons})),
        "stopped_because": f"all {most} points done" if done == most else f"{done} of {most} points done",
        "axes": [{"name": axis.name, "values": list(axis.values)} for axis in planned.axes],
        "comparisons": comparisons,
    }, differ
