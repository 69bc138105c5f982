"""How every figure looks: sizes, and one colour, line and marker for each arm (Okabe and Ito's colours, which
colour-blind readers tell apart; light and dark enough to differ in grey)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlap_bench.harness.analysis.words import Ranged

WIDTH = 7.2  # inches: a page
LEGEND_HANDLE, LEGEND_LETTER = 0.55, 0.062  # inches that an entry of a legend takes, and each letter of it
WIDE = 5.0  # from here on panels stand side by side, and texts beside a plot

INK, MUTED, GRID, BAND = "#1b1b1b", "#666666", "#dddddd", "#eeeeee"


@dataclass(frozen=True, slots=True)
class Look:
    """How one arm is drawn. `face`: what its markers are filled with."""

    colour: str
    face: str
    line: str | tuple[int, tuple[int, ...]]  # a line style of matplotlib
    marker: str
    hatch: str = ""


ARMS = {
    "before": Look("#d97f00", "white", "--", "o", "////"),
    "after": Look("#0072b2", "#0072b2", "-", "s"),
}

# Of other arms, in turn: also of Okabe and Ito's.
OTHERS = (
    Look("#1b1b1b", "white", "--", "o"),
    Look("#0072b2", "#0072b2", "-", "s"),
    Look("#d97f00", "#d97f00", "-.", "^"),
    Look("#009e73", "white", ":", "v"),
    Look("#d55e00", "#d55e00", (0, (5, 1)), "D"),
    Look("#56b4e9", "white", (0, (1, 1)), "P"),
    Look("#cc79a7", "#cc79a7", (0, (3, 1, 1, 1)), "X"),
    Look("#666666", "white", "-", "*"),
)

SETTINGS = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "text.parse_math": False,  # names come from runs, and a $ in one is a $
    "text.usetex": False,  # and no command for LaTeX, which can read files and start programs
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.8,
    "hatch.color": ARMS["before"].colour,
    "savefig.dpi": 200,
}


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """How each arm of a run is drawn. More arms than there are looks begin again from the first."""
    if all(arm in ARMS for arm in arms):
        return {arm: ARMS[arm] for arm in arms}
    return {arm: OTHERS[place % len(OTHERS)] for place, arm in enumerate(arms)}


@contextmanager
def drawing() -> Iterator[None]:
    """The settings while a figure is made; whatever the caller has set otherwise is left alone."""
    with matplotlib.rc_context(SETTINGS):
        yield


def panels(
    width: float, heights: tuple[float, ...], beside: bool = False, around: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A figure of several panels: side by side, as high as the highest, or under each other. `around`: so
    much of each height goes to titles and labels."""
    size = (width, max(heights) if beside else sum(heights))
    made = Figure(figsize=size, layout="constrained")
    ratios = None if beside else [height - around for height in heights]
    shape = (1, len(heights)) if beside else (len(heights), 1)
    axes = made.subplots(*shape, squeeze=False, height_ratios=ratios)
    return made, list(axes.flat)


def line(axes: Axes, points: Sequence[tuple[float, float]], look: Look, **more: Any) -> None:
    """Points, joined, as an arm looks; `more` as of Axes.plot."""
    axes.plot(
        [x for x, _ in points], [y for _, y in points], linestyle=look.line, color=look.colour,
        marker=look.marker, markerfacecolor=look.face, **more,
    )  # fmt: skip


def margin_band(axes: Axes, margin: float) -> None:
    """The margin, a fraction, around a line at zero: a band across a horizontal axis of percent."""
    axes.axvspan(-100 * margin, 100 * margin, color=BAND, lw=0, label=f"margin, ±{100 * margin:.3g}%")
    axes.axvline(0, color=MUTED, lw=1)


def say_beside(axes: Axes, place: float, said: str, weight: str = "normal") -> None:
    where = axes.get_yaxis_transform()
    axes.text(1.02, place, said, transform=where, va="center", weight=weight, size=8)


def spread(row: Ranged) -> list[list[float]] | None:
    """The interval of a row's change as its error bar, in percent; None where it has none."""
    if row.change is None or row.ci_low is None or row.ci_high is None:
        return None
    return [[100 * (row.change - row.ci_low)], [100 * (row.ci_high - row.change)]]


def legend_below(made: Figure, axes: Axes) -> None:
    """The legend of a panel under the whole figure, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        widest = LEGEND_HANDLE + LEGEND_LETTER * max(map(len, labels))
        columns = min(len(labels), max(1, int(made.get_figwidth() / widest)))
        made.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=2.4)
