"""What delays in each phase of a step cost it: `bench sensitivity`."""

from __future__ import annotations

from matplotlib.figure import Figure

from overlap_bench.harness.analysis.sensitivity import Phase, Sensitivity
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.given import check

HEIGHT = 3.4  # inches


def sensitivity(found: Sensitivity, width: float = style.WIDTH) -> Figure:
    """What a step takes longer, us, against what each of its phases was delayed by: points as measured, with
    the line that was fitted. On the grey line every microsecond is felt; what lies below is hidden."""
    check(found, Sensitivity)
    looks = style.looks([each.phase for each in found.phases])
    with style.drawing():
        made, (axes,) = style.panels(width, (HEIGHT,))
        longest = max((x for each in found.phases for x, _ in each.points), default=1.0)
        axes.plot([0, longest], [0, longest], color=style.GRID, lw=3, label="all of it is felt")
        for each in found.phases:
            look = looks[each.phase]
            xs, ys = zip(*each.points, strict=True)
            axes.plot(xs, ys, look.marker, color=look.colour, markerfacecolor=look.face)
            line = [(x, cost(each, x)) for x in sorted({0.0, each.slack_us or 0.0, max(xs)})]
            style.line(axes, line, look, markevery=[], label=each.phase)
        axes.set_xlabel("delay in the phase, us a step")
        axes.set_ylabel("a step takes longer, us")
        axes.set_title(
            f"{found.engine}, {found.model}, batch {found.batch}: a step of {found.step_us:,.0f} us"
        )
        style.legend_below(made, axes)
    return made


def cost(each: Phase, delay_us: float) -> float:
    return each.slope * max(0.0, delay_us - (each.slack_us or 0.0))
