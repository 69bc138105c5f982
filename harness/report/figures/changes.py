"""What changed, and how sure that is: by metric, and trial by trial."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlap_bench.engines import api
from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Comparison, MetricRow
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.report import tables
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.given import comparison_of
from overlap_bench.harness.stats import paired

ROW = 0.25  # inches
# How a metric is told apart: marker, and whether it is filled.
KINDS = {
    "primary": ("D", True),
    "declared secondary": ("s", True),
    "descriptive, no verdict": ("o", False),
}
ORDERS = {False: ("^", "before began"), True: ("v", "after began")}


def changes(run: Run, width: float = style.WIDTH) -> Figure:
    """The metrics of tables.chosen that have a change in percent: after/before - 1, its interval, and the
    margin. What can be zero has none; it is in the tables, and host phases in plots.phases."""
    comparison = comparison_of(run)
    found = comparison.metrics
    rows = {
        name: found[name]
        for name in tables.chosen(comparison)
        if name in found and found[name].change is not None
    }
    if not rows:
        raise api.BadSetting(f"{run.folder} has no change to show: it has one arm")
    with style.drawing():
        made, (axes,) = style.panels(width, (1.15 + ROW * len(rows),))
        style.margin_band(axes, comparison.margin)
        shown = set()
        for place, (name, row) in enumerate(rows.items()):
            kind = _kind(comparison, name)
            _line(axes, place, row, kind, label=None if kind in shown else kind)
            shown.add(kind)
            if width >= style.WIDE:
                weight = "bold" if kind == "primary" else "normal"
                style.say_beside(axes, place, f"{words.difference(row)} {words.interval(row)}", weight)
        higher = {name: " ↑" for name, row in rows.items() if row.better == "higher"}
        axes.set_yticks(range(len(rows)), [name + higher.get(name, "") for name in rows])
        for label, name in zip(axes.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if name == comparison.primary else "normal")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel("change, after/before − 1 (%)")
        blocks, confidence = comparison.blocks, words.confidence(comparison.confidence)
        axes.set_title(
            "Change; one trial, no interval"
            if blocks == 1
            else f"Change, {confidence}% interval, {blocks} trials"
        )
        if higher:
            axes.plot([], [], " ", label="↑ higher is better")
        style.legend_below(made, axes)
    return made


def _line(axes: Axes, place: int, row: MetricRow, kind: str, label: str | None) -> None:
    marker, filled = KINDS[kind]
    assert row.change is not None
    axes.errorbar(
        100 * row.change, place, xerr=style.spread(row), label=label, capsize=2.5, lw=1.4,
        color=style.ARMS["after"].colour, marker=marker, linestyle="none",
        markerfacecolor=style.ARMS["after"].colour if filled else "white",
        markersize=6 if kind == "primary" else 4.5,
    )  # fmt: skip


def _kind(comparison: Comparison, name: str) -> str:
    if name == comparison.primary:
        return "primary"
    judged = comparison.metrics[name].verdict is not None
    return "declared secondary" if judged else "descriptive, no verdict"


def trial_changes(run: Run, metric: str | None = None, width: float = style.WIDTH) -> Figure:
    """The change in each trial (one point: a fresh boot of each arm), its mean and interval from the result,
    and the margin, so that the noise is seen under the mean. `metric` None: the primary. In percent, or in
    the unit of a metric that can be zero."""
    found = comparison_of(run)
    name = of_today(metric or found.primary)
    row: MetricRow = api.pick(name, found.metrics, "metric of this run")
    if found.after is None:
        raise api.BadSetting(f"{run.folder} has one arm, so no trial has a change")
    if row.after is None:
        raise api.BadSetting(f"{name} was not measured in every trial of both arms")
    scale: paired.Scale = "difference" if row.change is None else "ratio"
    factor, unit = (1, row.unit) if row.change is None else (100, "%")
    values = run.values.pivot(index="trial", columns="arm", values=name)
    values = values.iloc[: found.blocks + len(found.left_out)].drop(index=found.left_out)
    before, after = (values[arm].tolist() for arm in run.arms)
    changes = [factor * paired.as_change(each, scale) for each in paired.paired(before, after, scale)]
    with style.drawing():
        made, (axes,) = style.panels(width, (2.9,))
        axes.axhline(0, color=style.MUTED, lw=1)
        colour = style.ARMS["after"].colour
        if row.ci_low is not None and row.ci_high is not None:
            label = f"{words.confidence(found.confidence)}% interval of the mean"
            axes.axhspan(
                factor * row.ci_low, factor * row.ci_high, color=colour, alpha=0.18, lw=0, label=label
            )
        if row.change is not None:
            margin = 100 * found.margin
            for side, named in ((-margin, f"margin, ±{margin:.3g}%"), (margin, None)):
                axes.axhline(side, color=style.MUTED, lw=1, ls=":", label=named)
        mean = row.delta if row.change is None else row.change
        axes.axhline(factor * (mean or 0), color=colour, lw=1.6, label=f"mean {words.difference(row)}")
        for after_first, (marker, label) in ORDERS.items():
            places = [place for place in values.index if run.manifest.after_first[place] == after_first]
            its = [change for place, change in zip(values.index, changes, strict=True) if place in places]
            axes.plot(
                places, its, marker, color=style.INK, label=label,
                markersize=6, markerfacecolor="white" if after_first else style.INK,
            )  # fmt: skip
        axes.set_xticks(values.index)
        axes.set_xlim(values.index[0] - 0.5, values.index[-1] + 0.5)
        axes.grid(False, axis="x")
        axes.set_xlabel("trial")
        axes.margins(y=0.1)
        axes.set_ylabel(f"change ({unit})" if unit else "change")
        axes.set_title(f"{name}: change in each trial")
        style.legend_below(made, axes)
    return made
