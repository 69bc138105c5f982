"""Where the host's time goes in a decode step, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engines import api
from harness.analysis import words
from harness.analysis.result import Comparison, MetricRow
from harness.common import formatting
from harness.metrics import definitions
from harness.report.figures import style

ROW, HEAD = 0.42, 0.75  # inches: of a phase, and of what stands around a panel
TITLES = {
    False: "Host work per decode step",
    True: "Waits per decode step (mostly for the device; another scale)",
}


def phases(comparison: Comparison, width: float = style.WIDTH) -> Figure:
    """Mean of each host phase per decode step, us: zero-based bars, work and waits apart, since a wait for
    the device dwarfs the rest. Phases may run at the same time in two threads, so they are not stacked.
    Beside each pair: the difference and its interval, from the result."""
    rows = {
        phase: comparison.metrics[definitions.phase_metric(phase)]
        for phase in api.PHASES
        if definitions.phase_metric(phase) in comparison.metrics
    }
    seen = {phase: row for phase, row in rows.items() if row.before or row.after}
    groups = {wait: [name for name in seen if name.startswith("wait.") == wait] for wait in (False, True)}
    groups = {wait: names for wait, names in groups.items() if names}
    if not groups:
        raise api.BadSetting(f"{comparison.variant} has no step records, so no phases")
    sides = ("before",) if comparison.after is None else ("before", "after")
    with style.drawing():
        heights = tuple(HEAD + ROW * len(names) for names in groups.values())
        made, axes = style.panels(width, heights, beside=False, around=HEAD)
        for panel, (wait, names) in zip(axes, groups.items(), strict=True):
            _bars(panel, {name: seen[name] for name in names}, sides, full=width >= style.WIDE)
            panel.set_title(TITLES[wait] if width >= style.WIDE else TITLES[wait].partition(" (")[0])
        axes[-1].set_xlabel("us, mean over decode steps, from 0")
        style.legend_below(made, axes[0])
    return made


def _bars(axes: Axes, rows: Mapping[str, MetricRow], sides: Sequence[str], full: bool) -> None:
    height = 0.76 / len(sides)
    for index, side in enumerate(sides):
        look = style.ARMS[side]
        axes.barh(
            [place + (index - (len(sides) - 1) / 2) * height for place in range(len(rows))],
            [row.of(side) or 0 for row in rows.values()],
            height, label=side, hatch=look.hatch, edgecolor=look.colour, lw=1,
            facecolor=look.face,
        )  # fmt: skip
    for place, row in enumerate(rows.values()):
        longest = max(row.of(side) or 0 for side in sides)
        said = _said(row, sides, full)
        axes.annotate(said, (longest, place), (4, 0), textcoords="offset points", va="center", size=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.6 if full else 1.5)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def _said(row: MetricRow, sides: Sequence[str], full: bool) -> str:
    """Beside a pair of bars: one too short to be seen still has its number."""
    values = " → ".join(formatting.number(row.of(side)) for side in sides)
    if len(sides) == 1:
        return f"{values} us"
    changed = f"{words.difference(row)} {words.interval(row)}"
    return f"{values}, {changed}" if full else changed
