"""What each toggle of a factorial gives: alone, on average, and with all others."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overlap_bench.engines import api
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Effect, Effects
from overlap_bench.harness.analysis.words import confidence, interval
from overlap_bench.harness.common.formatting import blocks_of, percent
from overlap_bench.harness.report.factorial_tables import taken_for_none
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.given import check
from overlap_bench.harness.stats.contrasts import label

ROW, APART = 0.62, 0.24  # inches of a row; of it, how far apart its marks stand
REACH = 4  # times the largest change: an interval that goes beyond would press all else onto the zero line
BLUE, ORANGE = style.ARMS["after"].colour, style.ARMS["before"].colour
# By where the other toggles stand: the mark, its colour, whether it is filled (only what carries a verdict),
# and its place in the row.
COMPANY = {
    "alone": ("o", ORANGE, False, -1),
    "average": ("D", BLUE, True, 0),
    "described": ("D", BLUE, False, 0),
    "with_others": ("^", style.INK, False, 1),
    "together": ("s", BLUE, False, 0),
}
NAMES = {
    "alone": "alone: the others at their before",
    "average": "on average over the settings of the others (decides)",
    "described": "on average over the settings of the others, no verdict",
    "with_others": "with the others at their after",
    "together": "all at their after, against all at their before",
}


def effects(run: Run, metric: str | None = None, width: float = style.WIDTH) -> Figure:
    """Main effects in their three companies (COMPANY), interactions, and all toggles together, on one metric
    of a factorial (None: the primary): change in percent with its interval, and the margin. Filled
    marks carry a verdict; a * stands at effects aliased, by settings left out, with others taken for none."""
    check(run, Run)
    result = run.result
    if result.factorial is None:
        raise api.BadSetting(f"{run.folder} is not a factorial, so it has no effects")
    first, found = result.comparisons[0], result.factorial
    name = metric or first.primary
    chosen = api.pick(name, found.metrics, "metric of this factorial")
    rows = [_companies(chosen, row) for row in chosen.effects]
    names = [label(row.effect) + ("*" if row.assumes else "") for row in chosen.effects]
    if chosen.together is not None:
        names.append("all, against none")
        rows.append({"together": chosen.together})
    with style.drawing():
        made, axes = style.figure(width, 1.5 + sum(ROW if len(row) > 1 else 0.6 * ROW for row in rows))
        style.margin_band(axes, first.margin)
        places = _places(rows)
        shown: set[str] = set()
        for place, row in zip(places, rows, strict=True):
            for company, values in row.items():
                _mark(axes, place, company, values, NAMES[company] if company not in shown else None)
                shown.add(company)
            if width >= style.WIDE:
                _say(axes, place, next(iter(row.values())))
        if _cut(axes, rows, 100 * first.margin):
            axes.plot([], [], " ", label="an interval without an end goes on")
        assumed = taken_for_none(chosen.effects)
        if assumed:
            more = f" and {len(assumed) - 1} more" if len(assumed) > 1 else ""
            axes.plot([], [], " ", label=f"*: taking {assumed[0]}{more} as zero")
        axes.set_yticks(places, names)
        axes.set_ylim(places[-1] + 0.55, places[0] - 0.75)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        higher = ", higher is better" if chosen.better == "higher" else ""
        axes.set_xlabel(f"change of {name} (%){higher}")
        blocks = blocks_of(first.blocks)
        said = "no interval" if first.blocks == 1 else f"{confidence(first.confidence)}% intervals"
        axes.set_title(f"Effects on {name}" + (f", {blocks}, {said}" if width >= style.WIDE else ""))
        handles, labels = axes.get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower left", ncols=1 + (width >= style.WIDE))
    return made


def _companies(chosen: Effects, row: Effect) -> dict[str, Effect]:
    """What is drawn in the row of an effect, the effect first; an interaction has no company."""
    name, *more = row.effect
    ends = {} if more else {"alone": chosen.alone[name], "with_others": chosen.with_others[name]}
    average = "described" if row.verdict is None else "average"
    return {average: row} | {each: values for each, values in ends.items() if values is not None}


def _cut(axes: Axes, rows: list[dict[str, Effect]], margin: float) -> bool:
    """Ends the axis at REACH; whether an interval goes on beyond it."""
    drawn = [each for row in rows for each in row.values()]
    reach = REACH * max(margin, *(100 * abs(each.change) for each in drawn))
    ends = [100 * end for each in drawn for end in (each.ci_low, each.ci_high) if end is not None]
    if not ends or max(map(abs, ends)) <= reach:
        return False
    axes.set_xlim(max(-reach, 1.1 * min(*ends, -margin)), min(reach, 1.1 * max(*ends, margin)))
    return True


def _places(rows: list[dict[str, Effect]]) -> list[float]:
    """Rows with one mark stand closer."""
    heights = [1.0 if len(row) > 1 else 0.6 for row in rows]
    return [sum(heights[:place]) + height / 2 for place, height in enumerate(heights)]


def _mark(axes: Axes, place: float, company: str, row: Effect, name: str | None) -> None:
    marker, colour, filled, offset = COMPANY[company]
    change = 100 * row.change
    axes.errorbar(
        change, place + APART * offset, xerr=style.spread(row), label=name, capsize=2.5, lw=1.4, color=colour,
        marker=marker, linestyle="none", markerfacecolor=colour if filled else "white",
        markersize=5.5 if filled else 4.5,
    )  # fmt: skip


def _say(axes: Axes, place: float, row: Effect) -> None:
    said = f"{percent(row.change)} {interval(row)}"
    said += f"\n{row.verdict}" if row.verdict else ""
    style.say_beside(axes, place, said)
