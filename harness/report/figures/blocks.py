"""What each block said by itself, so that the noise is seen under the mean."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engines import api
from harness.analysis import words
from harness.analysis.frames import Run
from harness.analysis.stored import check_two
from harness.analysis.values import scale_of
from harness.report.figures import style
from harness.stats import paired

ORDERS = {False: ("^", "before began"), True: ("v", "after began")}


def block_changes(run: Run, metric: str | None = None, width: float = style.WIDTH) -> Figure:
    """The change in each block (one point: a fresh boot of each arm), its mean and interval from the result,
    and the margin. `metric` None: the primary. In percent, or in the unit of a metric that can be zero."""
    check_two(run.folder, run.manifest)
    (found,) = run.result.comparisons
    name = metric or found.primary
    row = api.pick(name, found.metrics, "metric of this run")
    if found.after is None:
        raise api.BadSetting(f"{run.folder} has one arm, so no block has a change")
    if row.after is None:
        raise api.BadSetting(f"{name} was not measured in every block of both arms")
    changes = _changes(run, name, found.blocks, ratio := row.change is not None)
    unit = "%" if ratio else row.unit
    scale = 100 if ratio else 1
    with style.drawing():
        made, axes = style.figure(width, 2.9)
        axes.axhline(0, color=style.MUTED, lw=1)
        if row.ci_low is not None and row.ci_high is not None:
            low, high = scale * row.ci_low, scale * row.ci_high
            label = f"{words.confidence(found)}% interval of the mean"
            axes.axhspan(low, high, color=style.ARMS["after"].colour, alpha=0.18, lw=0, label=label)
        if ratio:
            margin = 100 * found.margin
            for side, named in ((-margin, f"margin, ±{margin:.3g}%"), (margin, None)):
                axes.axhline(side, color=style.MUTED, lw=1, ls=":", label=named)
        mean = scale * (row.change if ratio else row.delta)
        said = f"mean {words.difference(row)}"
        axes.axhline(mean, color=style.ARMS["after"].colour, lw=1.6, label=said)
        _points(axes, run, changes)
        axes.set_xticks(range(len(changes)))
        axes.set_xlim(-0.5, len(changes) - 0.5)
        axes.grid(False, axis="x")
        axes.set_xlabel("block")
        axes.margins(y=0.1)
        axes.set_ylabel(f"change ({unit})" if unit else "change")
        axes.set_title(f"{name}: change in each block")
        style.legend_below(made, axes)
    return made


def _changes(run: Run, name: str, blocks: int, ratio: bool) -> list[float]:
    values = run.values.pivot(index="block", columns="arm", values=name).iloc[:blocks]
    before, after = (values[arm].tolist() for arm in run.arms)
    if ratio:
        return [100 * float(np.expm1(each)) for each in paired.paired(before, after, "ratio")]
    assert scale_of(name, before, after) == "difference"
    return [float(each) for each in paired.paired(before, after, "difference")]


def _points(axes: Axes, run: Run, changes: list[float]) -> None:
    for after_first, (marker, label) in ORDERS.items():
        places = [place for place in range(len(changes)) if run.manifest.after_first[place] == after_first]
        axes.plot(
            places, [changes[place] for place in places], marker, color=style.INK, label=label,
            markersize=6, markerfacecolor="white" if after_first else style.INK,
        )  # fmt: skip
