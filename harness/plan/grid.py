"""A grid of ordinary runs: the axes, and the design of each point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import PLANTED, make_design, parse_typed, spelled, types_of
from overlap_bench.harness.plan.variants import Variant
from overlap_bench.harness.workload.arrivals import ARRIVALS, TIMING_OPTIONS
from overlap_bench.harness.workload.plan import PLACES_FILLED, check
from overlap_bench.harness.workload.workload import Workload

MOST_POINTS = 200
NOT_SWEPT = (*PLANTED, "seed")  # an engine's seed makes its weights: whoever sweeps `seed` means the run's


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and the values it takes, as they were typed."""

    name: str
    values: tuple[str, ...]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: the value of each axis."""

    at: dict[str, str]
    design: Design


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
    request: Request,
    axes: Sequence[Axis],
    engines: Mapping[str, api.EngineSpec],
    variants: Mapping[str, Variant],
    guess_device: Callable[[], str],
) -> tuple[Point, ...]:
    """Every point of the grid with its design; the last axis changes the fastest. Raises BadSetting, naming
    the point, for what can't be run."""
    for axis in axes:
        check_axis(axis, request, engines)
    points = []
    for values in product(*(axis.values for axis in axes)):
        at = dict(zip((axis.name for axis in axes), values, strict=True))
        try:
            design = make_design(asked_at(request, at), engines, variants, guess_device)
            points.append(Point(at=at, design=with_places_filled(design, request, at)))
        except api.BadSetting as error:
            raise api.BadSetting(f"{spelled(at)}: {error}") from error
    if len(points) > MOST_POINTS:
        raise api.BadSetting(f"--over spans {len(points)} points, more than {MOST_POINTS}")
    for number, point in enumerate(points):
        for other in points[:number]:
            if other.design == point.design:
                raise api.BadSetting(f"{spelled(other.at)} and {spelled(point.at)} are the same run")
    return tuple(points)


def check_axis(axis: Axis, request: Request, engines: Mapping[str, api.EngineSpec]) -> None:
    """Raises BadSetting for what can't be swept, and for what another option sets too."""
    toggles = {toggle.name for spec in engines.values() for toggle in spec.toggles}
    known = dict.fromkeys([*kinds(), *sorted(toggles)])
    if not axis.name.startswith("env."):
        api.pick(axis.name, known, "setting to sweep")
    settings = [text.partition("=")[0] for text in (*request.both, *request.before, *request.after)]
    alone = {"variant": request.variant, "engine": request.engine}
    if axis.name in (*request.workload, *request.options, *settings) or alone.get(axis.name) is not None:
        raise api.BadSetting(f"{axis.name} is swept: leave it out elsewhere")


def kinds() -> dict[str, str]:
    """What can be swept besides toggles: where each setting belongs."""
    return {
        "variant": "variant",
        "engine": "engine",
        **dict.fromkeys(types_of(Workload), "workload"),
        **dict.fromkeys((name for name in types_of(api.EngineOptions) if name not in NOT_SWEPT), "options"),
        "python": "both",
    }


def asked_at(request: Request, at: Mapping[str, str]) -> Request:
    """What was asked, with the settings of a point."""
    for name, value in at.items():
        match kinds().get(name, "both"):
            case "variant" | "engine":
                request = msgspec.structs.replace(request, **{name: value})
            case "workload":
                typed = parse_typed(name, value, types_of(Workload)[name])
                request = msgspec.structs.replace(request, workload={**request.workload, name: typed})
            case "options":  # not as a change of the arms: a variant's metrics stay its own
                typed = parse_typed(name, value, types_of(api.EngineOptions)[name])
                request = msgspec.structs.replace(request, options={**request.options, name: typed})
            case _:
                request = msgspec.structs.replace(request, both=(*request.both, f"{name}={value}"))
    return msgspec.structs.replace(request, workload=with_arrival(request.workload, at))


def with_arrival(workload: Mapping[str, object], at: Mapping[str, str]) -> dict[str, object]:
    """Sweeping a timing option that only one kind of arrival looks at implies that one, where no arrival was
    asked for: concurrency implies a closed loop."""
    found = dict(workload)
    for name in TIMING_OPTIONS:
        ways = [arrival for arrival, each in ARRIVALS.items() if name in each.options]
        if name in at and len(ways) == 1:
            found.setdefault("arrival", ways[0])
    return found


def with_places_filled(design: Design, request: Request, at: Mapping[str, str]) -> Design:
    """The design, with PLACES_FILLED requests for each place of a closed loop, unless their number was asked
    for."""
    workload = design.workload
    places = workload.concurrency
    if "concurrency" not in at or places is None or "num_requests" in {**request.workload, **at}:
        return design
    workload = msgspec.structs.replace(
        workload, num_requests=max(workload.num_requests, PLACES_FILLED * places)
    )
    check(workload)
    return msgspec.structs.replace(design, workload=workload)
