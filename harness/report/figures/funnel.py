"""Runs of an arm against itself: whether their intervals are wide enough for the changes they show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from engines import api
from harness.analysis import words
from harness.analysis.result import Comparison
from harness.report.figures import style
from harness.stats.stopping import ALPHA


def funnel(
    comparisons: Sequence[Comparison], metric: str | None = None, width: float = style.WIDTH
) -> Figure:
    """The change of each A/A comparison over the half-width of its interval (as log ratios, in percent). The
    lines are where the two are equal: an honest 95% interval leaves one point in twenty outside them, on
    either side alike, whatever the number of blocks. `metric` None: the primary of each.

    That holds for a number of blocks that was fixed beforehand. A run that may stop early has wider
    intervals, at its look's level, and stops there because of what they hold: of those that stopped at a
    look, no known share is expected outside. So such runs raise BadSetting.

    The usual funnel has the standard error in place of the half-width, and lines that only hold for many
    blocks; with few, t makes each run's own half-width the exact one. Source of the plot: Sterne & Egger,
    "Funnel plots for detecting bias in meta-analysis", J. Clin. Epidemiol. 2001.
    """
    points = [_point(each, metric) for each in comparisons]
    kept = [each for each in points if each is not None]
    if not kept:
        raise api.BadSetting("there is no A/A comparison with an interval to draw")
    outside = sum(abs(change) > half for half, change, _ in kept)
    blocks = sorted({count for _, _, count in kept})
    reach = 1.1 * max(half for half, _, _ in kept)
    with style.drawing():
        made, axes = style.figure(width, 3.4)
        axes.fill_between([0, reach], [0, -reach], [0, reach], color=style.BAND, lw=0)
        for side, name in ((1, "95% funnel: change = half-width"), (-1, None)):
            axes.plot([0, reach], [0, side * reach], color=style.MUTED, lw=1, ls="--", label=name)
        axes.axhline(0, color=style.MUTED, lw=1)
        looks = style.looks([str(count) for count in blocks])
        for count in blocks:
            look = looks[str(count)]
            mine = [(half, change) for half, change, each in kept if each == count]
            axes.plot(
                [half for half, _ in mine], [change for _, change in mine], look.marker, color=look.colour,
                markerfacecolor=look.face, label=f"{count} blocks",
            )  # fmt: skip
        axes.set_xlim(0, reach)
        name = metric or comparisons[0].primary
        axes.set_xlabel("half-width of the 95% interval (%)")
        axes.set_ylabel(f"change of {name} (%)")
        runs = f"{len(kept)} run{'s' if len(kept) != 1 else ''} of an arm against itself"
        axes.set_title(f"{runs}: {outside} outside, {ALPHA * len(kept):.2g} expected")
        style.legend_below(made, axes)
    return made


def _point(comparison: Comparison, metric: str | None) -> tuple[float, float, int] | None:
    """(half-width, change, blocks) of a comparison, as log ratios in percent; None without an interval.
    Raises BadSetting where the arms are not equal."""
    if comparison.after is None or comparison.after != comparison.before:
        raise api.BadSetting(f"{comparison.variant} is not an A/A: a funnel takes runs of bench aa")
    if comparison.confidence != 1 - ALPHA:
        raise api.BadSetting(
            f"{comparison.variant} could stop early, its intervals are of "
            f"{words.confidence(comparison)}%: a funnel takes runs of a fixed number of blocks, as "
            "bench aa --blocks 8 makes"
        )
    row = api.pick(metric or comparison.primary, comparison.metrics, "metric of this run")
    if row.change is None or row.ci_low is None or row.ci_high is None:
        return None
    low, high = np.log1p(row.ci_low), np.log1p(row.ci_high)
    return 50 * float(high - low), 100 * float(np.log1p(row.change)), int(comparison.blocks)
