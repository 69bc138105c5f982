"""What a sweep found: how levels and gains move along its axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from overlap_bench.engines import api
from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.result import PointResult, SweepResult
from overlap_bench.harness.analysis.sweep import Sweep
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.settings import spelled
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.given import check
from overlap_bench.harness.stats import verdicts

BESIDE = 3  # panels in a row, at most
STRETCHED = 8  # largest over smallest value of the axis, from which it is logarithmic
HEIGHT = 2.9  # inches of a panel


@dataclass(frozen=True, slots=True)
class Series:
    """The points that differ along one axis only. `name`: where the other axes stand, "" without others."""

    name: str
    places: tuple[float, ...]  # ascending
    comparisons: tuple[PointResult, ...]


def series(sweep: Sweep, axis: str | None = None) -> tuple[str, list[Series]]:
    """The axis (None: the first whose values are numbers) and the points along it. Raises BadSetting where
    there is none."""
    check(sweep, Sweep)
    result = sweep.result
    numbers = _axes_of_numbers(result)
    if not numbers:
        raise api.BadSetting(f"{result.run} has no axis of numbers to draw along")
    chosen: str = axis or numbers[0]
    api.pick(chosen, dict.fromkeys(numbers), "axis of numbers")
    grouped: dict[str, list[PointResult]] = {}
    for each in result.comparisons:
        others = {name: value for name, value in each.at.items() if name != chosen}
        name = next(iter(others.values())) if len(others) == 1 else spelled(others)
        grouped.setdefault(name, []).append(each)
    found = []
    for name, points in grouped.items():
        points.sort(key=lambda each: float(each.at[chosen]))
        found.append(Series(name, tuple(float(each.at[chosen]) for each in points), tuple(points)))
    return chosen, found


def _axes_of_numbers(result: SweepResult) -> list[str]:
    names = [each.name for each in result.axes]
    return [name for name in names if all(_is_number(each.at[name]) for each in result.comparisons)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def against(
    sweep: Sweep,
    metric: str = "tpot_ms_p50",
    axis: str | None = None,
    width: float = style.WIDTH,
) -> Figure:
    """A metric along the axis of a sweep, before and after; a panel for each setting of the other axes. From
    zero, so that a height is a level; the sweep's axis is logarithmic where it is stretched, and says so."""
    chosen, found = series(sweep, axis)
    metric = of_today(metric)
    unit = _unit(metric)
    with style.drawing():
        made, panels = _panels(found, width)
        for panel, each in zip(panels, found, strict=True):
            for side, points in _sides(each, metric).items():
                style.line(panel, points, style.ARMS[side], label=side)
            _along(panel, chosen, each.places)
            panel.set_title(each.name)
        _from_zero(panels)
        _name_first(panels, f"{metric} ({unit})" if unit else metric, width)
        style.legend_below(made, panels[0])
    return made


def frontier(
    sweep: Sweep,
    latency: str = "tpot_ms_p50",
    throughput: str = "throughput_tok_s",
    axis: str | None = None,
    width: float = style.WIDTH,
) -> Figure:
    """Latency against throughput, before and after: a point for each value of the axis, joined in its order
    and named at the after arm's. Down and to the right is better; both axes start at zero."""
    chosen, found = series(sweep, axis)
    with style.drawing():
        made, panels = _panels(found, width)
        for panel, each in zip(panels, found, strict=True):
            xs, ys = _sides(each, throughput), _sides(each, latency)
            for side in [side for side in xs if side in ys]:
                places = dict(xs[side])
                points = [(place, places[place], value) for place, value in ys[side] if place in places]
                style.line(panel, [(x, y) for _, x, y in points], style.ARMS[side], label=side)
            before = dict(ys.get("before", ()))
            for place, x, y in points:
                above = y > before.get(place, y)  # away from the other arm's mark
                panel.annotate(
                    f"{place:g}", (x, y), (3, 5 if above else -10), textcoords="offset points", size=7
                )
            panel.set_title(each.name)
            panel.set_xlabel(f"{throughput} ({_unit(throughput)})")
            panel.margins(x=0.12)
            panel.set_xlim(left=0)
        _from_zero(panels)
        _name_first(panels, f"{latency} ({_unit(latency)})", width)
        panels[0].plot([], [], " ", label=f"numbers: {chosen}")
        style.legend_below(made, panels[0])
    return made


def gains(
    sweep: Sweep,
    metric: str | None = None,
    axis: str | None = None,
    width: float = style.WIDTH,
) -> Figure:
    """The change of a metric (None: the primary) at each value of the axis, with its interval, and the
    margin. Filled marks are points whose verdict is a change; each is judged by itself, and where points may
    stop early each interval has its own confidence."""
    chosen, found = series(sweep, axis)
    result = sweep.result
    first = result.comparisons[0]
    name = of_today(metric or first.primary)
    api.pick(name, first.metrics, "metric of this sweep")
    if all(name not in each.metrics or each.metrics[name].change is None for each in result.comparisons):
        raise api.BadSetting(f"{result.run} has no change of {name} in percent to draw")
    colour = style.ARMS["after"].colour
    with style.drawing():
        made, panels = _panels(found, width)
        for panel, each in zip(panels, found, strict=True):
            style.margin_band(panel, first.margin, upright=False)
            for place, comparison in zip(each.places, each.comparisons, strict=True):
                row = comparison.metrics.get(name)
                if row is not None and row.change is not None:
                    face = colour if row.verdict in verdicts.CHANGES else "white"
                    panel.errorbar(
                        place, 100 * row.change, yerr=style.spread(row), color=colour, marker="s",
                        linestyle="none", capsize=2.5, markerfacecolor=face,
                    )  # fmt: skip
            _along(panel, chosen, each.places)
            panel.set_title(each.name)
        for face, label in (
            ("white", f"change, {words.confidences(result.comparisons)}% interval"),
            (colour, "called a change"),
        ):
            panels[0].errorbar(
                [], [], yerr=[], color=colour, marker="s", linestyle="none", capsize=2.5,
                markerfacecolor=face, label=label,
            )  # fmt: skip
        lows, highs = zip(*(panel.get_ylim() for panel in panels), strict=True)
        for panel in panels:
            panel.set_ylim(min(lows), max(highs))
        higher = ", higher is better" if definitions.METRICS[name].better == "higher" else ""
        _name_first(panels, f"change of {name} (%){higher}", width)
        style.legend_below(made, panels[0])
    return made


def _unit(metric: str) -> str:
    found: definitions.Metric = api.pick(metric, definitions.METRICS, "metric")
    return found.unit


def _sides(each: Series, metric: str) -> dict[str, list[tuple[float, float]]]:
    """By arm, (place, value) of each point that has one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for place, comparison in zip(each.places, each.comparisons, strict=True):
        row = comparison.metrics.get(metric)
        for side in style.ARMS:
            value = None if row is None else row.of(side)
            if value is not None:
                found.setdefault(side, []).append((place, value))
    if not found:
        raise api.BadSetting(f"{metric} was measured at no point of {each.name or 'this sweep'}")
    return found


def _panels(found: Sequence[Series], width: float) -> tuple[Figure, list[Axes]]:
    beside = width >= style.WIDE and len(found) <= BESIDE
    return style.panels(width, (HEIGHT,) * len(found), beside=beside, around=0.0 if beside else 0.6)


def _along(axes: Axes, name: str, places: Sequence[float]) -> None:
    """The axis of the sweep, with a tick at each value that was measured."""
    scale = ""
    if places[0] > 0 and places[-1] >= STRETCHED * places[0]:
        axes.set_xscale("log")
        axes.set_xlim(places[0] / 1.25, places[-1] * 1.25)
        scale = ", log scale"
    else:
        axes.margins(x=0.08)
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    unit = " (ms)" if name.endswith("_ms") else ""
    axes.set_xlabel(f"{name}{unit}{scale}")


def _from_zero(panels: Sequence[Axes]) -> None:
    """One scale for all, from zero."""
    high = max(panel.get_ylim()[1] for panel in panels)
    for panel in panels:
        panel.set_ylim(0, 1.05 * high)


def _name_first(panels: Sequence[Axes], name: str, width: float) -> None:
    """The vertical axis is named once where panels stand beside each other."""
    beside = width >= style.WIDE and len(panels) <= BESIDE
    for panel in panels[:1] if beside else panels:
        panel.set_ylabel(name)
