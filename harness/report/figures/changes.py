"""What changed, and how sure that is: one line per metric, with its interval and the margin."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from engines import api
from harness.analysis import words
from harness.analysis.result import Comparison, MetricRow
from harness.report import tables
from harness.report.figures import style

ROW = 0.25  # inches
# How a metric is told apart: marker, and whether it is filled.
KINDS = {
    "primary": ("D", True),
    "declared secondary": ("s", True),
    "descriptive, no verdict": ("o", False),
}


def changes(comparison: Comparison, width: float = style.WIDTH) -> Figure:
    """The metrics of tables.chosen that have a change in percent: after/before - 1, its interval, and the
    margin. What can be zero has none; it is in the tables, and host phases in plots.phases."""
    metrics = comparison.metrics
    names = [
        name for name in tables.chosen(comparison) if name in metrics and metrics[name].change is not None
    ]
    if not names:
        raise api.BadSetting(f"{comparison.variant} has no change to show: it has one arm")
    with style.drawing():
        made, axes = style.figure(width, 1.15 + ROW * len(names))
        margin = 100 * comparison.margin
        axes.axvspan(-margin, margin, color=style.BAND, lw=0, label=f"margin, ±{margin:.3g}%")
        axes.axvline(0, color=style.MUTED, lw=1)
        shown = set()
        for place, name in enumerate(names):
            row = metrics[name]
            kind = _kind(comparison, name)
            _line(axes, place, row, kind, label=None if kind in shown else kind)
            shown.add(kind)
            if width >= style.WIDE:
                said = f"{words.difference(row)} {words.interval(row)}"
                weight = "bold" if kind == "primary" else "normal"
                axes.text(
                    1.02, place, said, transform=axes.get_yaxis_transform(), va="center", weight=weight,
                    size=8,
                )  # fmt: skip
        axes.set_yticks(range(len(names)), [_label(name, metrics[name]) for name in names])
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            label.set_fontweight("bold" if name == comparison.primary else "normal")
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel("change, after/before − 1 (%)")
        axes.set_title(_title(comparison))
        if any(metrics[name].better == "higher" for name in names):
            axes.plot([], [], " ", label="↑ higher is better")
        style.legend_below(made, axes)
    return made


def _line(axes: Any, place: int, row: MetricRow, kind: str, label: str | None) -> None:
    marker, filled = KINDS[kind]
    assert row.change is not None
    change = 100 * row.change
    axes.errorbar(
        change, place, xerr=style.spread(row), label=label, capsize=2.5, lw=1.4,
        color=style.ARMS["after"].colour, marker=marker, linestyle="none",
        markerfacecolor=style.ARMS["after"].colour if filled else "white",
        markersize=6 if kind == "primary" else 4.5,
    )  # fmt: skip


def _kind(comparison: Comparison, name: str) -> str:
    if name == comparison.primary:
        return "primary"
    judged = comparison.metrics[name].verdict is not None
    return "declared secondary" if judged else "descriptive, no verdict"


def _label(name: str, row: MetricRow) -> str:
    return f"{name} ↑" if row.better == "higher" else name


def _title(comparison: Comparison) -> str:
    blocks = comparison.blocks
    if blocks == 1:
        return "Change; one block, no interval"
    return f"Change, {words.confidence(comparison)}% interval, {blocks} blocks"
