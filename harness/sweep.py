"""A grid of ordinary runs, one after the other, since measurements must not share a machine.

    results/<time>-sweep-<axes>-<id>/
        sweep.json          what was asked: the axes, and the design of each point
        <time>-<name>-<id>/ the run of a point, as `bench run` leaves it

A point is done when the folder holds a finished run of its design: nothing else says so, and so a sweep that
was killed at any time goes on from what is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from engines import api
from harness import store
from harness.design import Design
from harness.machine import Code, Machine
from harness.settings import PLANTED, Asked, make_design, parse_typed, spelled
from harness.store import Manifest
from harness.variants import Variant
from harness.workload import Workload
from harness.workload.arrivals import ARRIVALS, TIMING_OPTIONS

MOST_POINTS = 200
NOT_SWEPT = (*PLANTED, "seed")  # an engine's seed makes its weights: whoever sweeps `seed` means the run's
PLACES_FILLED = 2  # requests per place of a closed loop, where nobody says how many


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and the values it takes, as they were typed."""

    name: str
    values: tuple[str, ...]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: the value of each axis."""

    at: dict[str, str]
    design: Design


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


# ---------------------------------------------------------------------------------------------------------
# What is asked


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """ "concurrency=1,8,32" texts as axes; a flag's spelling (num-requests) will do. Raises BadSetting."""
    axes: list[Axis] = []
    for text in texts:
        flag, equals, values = text.partition("=")
        name = flag if "." in flag else flag.replace("-", "_")
        listed = tuple(value.strip() for value in values.split(","))
        if not (flag and equals and all(listed)):
            raise api.BadSetting(f"--over needs NAME=VALUE,VALUE,..., not '{text}'")
        if len(listed) == 1:
            raise api.BadSetting(f"--over {text} has one value, and a sweep needs at least two")
        if len(set(listed)) < len(listed):
            raise api.BadSetting(f"--over {text} names a value twice")
        if name in (axis.name for axis in axes):
            raise api.BadSetting(f"--over {name} is given twice")
        axes.append(Axis(name=name, values=listed))
    return tuple(axes)


def make_points(
    asked: Asked,
    axes: Sequence[Axis],
    engines: Mapping[str, api.EngineSpec],
    variants: Mapping[str, Variant],
    guess_device: Callable[[], str],
) -> tuple[Point, ...]:
    """Every point of the grid with its design; the last axis changes the fastest. Raises BadSetting, naming
    the point, for what can't be run."""
    for axis in axes:
        check_axis(axis, asked, engines)
    points = []
    for values in product(*(axis.values for axis in axes)):
        at = dict(zip((axis.name for axis in axes), values, strict=True))
        try:
            design = make_design(asked_at(asked, at), engines, variants, guess_device)
            points.append(Point(at=at, design=with_places_filled(design, asked, at)))
        except api.BadSetting as error:
            raise api.BadSetting(f"{spelled(at)}: {error}") from error
    if len(points) > MOST_POINTS:
        raise api.BadSetting(f"--over spans {len(points)} points, more than {MOST_POINTS}")
    for number, point in enumerate(points):
        for other in points[:number]:
            if other.design == point.design:
                raise api.BadSetting(f"{spelled(other.at)} and {spelled(point.at)} are the same run")
    return tuple(points)


def check_axis(axis: Axis, asked: Asked, engines: Mapping[str, api.EngineSpec]) -> None:
    """Raises BadSetting for what can't be swept, and for what another option sets too."""
    toggles = {toggle.name for spec in engines.values() for toggle in spec.toggles}
    known = dict.fromkeys([*kinds(), *sorted(toggles)])
    if not axis.name.startswith("env."):
        api.pick(axis.name, known, "setting to sweep")
    settings = [text.partition("=")[0] for text in (*asked.both, *asked.before, *asked.after)]
    alone = {"variant": asked.variant, "engine": asked.engine}
    if axis.name in (*asked.workload, *asked.options, *settings) or alone.get(axis.name) is not None:
        raise api.BadSetting(f"{axis.name} is swept: leave it out elsewhere")


def kinds() -> dict[str, str]:
    """What can be swept besides toggles: where each setting belongs."""
    options = (field.name for field in msgspec.structs.fields(api.EngineOptions))
    return {
        "variant": "variant",
        "engine": "engine",
        **dict.fromkeys((field.name for field in msgspec.structs.fields(Workload)), "workload"),
        **dict.fromkeys((name for name in options if name not in NOT_SWEPT), "both"),
        "python": "both",
    }


def asked_at(asked: Asked, at: Mapping[str, str]) -> Asked:
    """What was asked, with the settings of a point."""
    for name, value in at.items():
        match kinds().get(name, "both"):
            case "variant":
                asked = replace(asked, variant=value)
            case "engine":
                asked = replace(asked, engine=value)
            case "workload":
                fields = {field.name: field.type for field in msgspec.structs.fields(Workload)}
                asked = replace(
                    asked, workload={**asked.workload, name: parse_typed(name, value, fields[name])}
                )
            case _:
                asked = replace(asked, both=(*asked.both, f"{name}={value}"))
    return replace(asked, workload=with_arrival(asked.workload, at))


def with_arrival(workload: Mapping[str, Any], at: Mapping[str, str]) -> dict[str, Any]:
    """Sweeping a timing option that only one kind of arrival looks at implies that one, where no arrival was
    asked for: concurrency implies a closed loop."""
    found = dict(workload)
    for name in TIMING_OPTIONS:
        ways = [arrival for arrival, each in ARRIVALS.items() if name in each.options]
        if name in at and len(ways) == 1:
            found.setdefault("arrival", ways[0])
    return found


def with_places_filled(design: Design, asked: Asked, at: Mapping[str, str]) -> Design:
    """A closed loop of more places than requests would be measured at a smaller concurrency than it is shown
    at: so a point has at least two requests a place, unless their number was asked for."""
    workload = design.workload
    places = workload.concurrency
    if "concurrency" not in at or places is None:
        return design
    if "num_requests" in asked.workload or "num_requests" in at:
        if workload.num_requests < places:
            raise api.BadSetting(
                f"num_requests={workload.num_requests} leaves some of {places} places empty; leave it out, "
                f"or ask for {PLACES_FILLED * places}"
            )
        return design
    count = max(workload.num_requests, PLACES_FILLED * places)
    return msgspec.structs.replace(design, workload=msgspec.structs.replace(workload, num_requests=count))


# ---------------------------------------------------------------------------------------------------------
# What is on disk


def read(folder: Path) -> Sweep:
    """Raises StoreError for a folder that is no sweep, or whose file is damaged or newer."""
    return store.read_json(folder / store.SWEEP_FILE, Sweep, "a sweep folder")


def runs_in(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The runs in a sweep's folder, finished or not, the oldest first."""
    for inside in sorted(folder.iterdir()):
        if (inside / "manifest.json").exists():
            yield inside, store.read_manifest(inside)


def run_of(point: Point, runs: Sequence[tuple[Path, Manifest]]) -> tuple[Path, Manifest] | None:
    """The run of a point, whether it is finished or not."""
    return next((each for each in runs if each[1].design == point.design), None)


def is_done(run: Path) -> bool:
    """Whether a run has come to its end."""
    return (run / "summary.json").exists()


def check_resume(stored: Sweep, now: Sweep) -> None:
    """Raises StoreError, naming the difference, unless `now` is the same commit, points and machine."""
    for what in ("code", "points", "machine", "versions"):
        old, new = (msgspec.to_builtins(getattr(each, what)) for each in (stored, now))
        found = store.difference(old, new, what)
        if found:
            raise store.StoreError(f"can't resume {stored.sweep}: {found}; start a fresh sweep")


def described_here(axes: tuple[Axis, ...], points: tuple[Point, ...], name: str, now: datetime) -> Sweep:
    """The record of a sweep that starts here and now."""
    from harness import machine

    return Sweep(
        schema_version=store.SCHEMA_VERSION,
        sweep=name,
        created=now.isoformat(timespec="seconds"),
        axes=axes,
        points=points,
        machine=machine.fingerprint(),
        code=machine.code(),
        versions=machine.versions(),
    )
