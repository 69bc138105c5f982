"""What a bisection found: `bench bisect`."""

from __future__ import annotations

from matplotlib.figure import Figure

from overlap_bench.harness.analysis.bisection import Bisected
from overlap_bench.harness.report.figures import style

HEIGHTS, AROUND = (2.6, 1.7), 0.4  # inches
LABELS = 12  # at most, of commits along the axis
INCHES = 0.55  # that each of them takes
SHORT = 8  # characters of a commit


def bisection(found: Bisected, width: float = style.WIDTH) -> Figure:
    """The change against good of each commit that was measured, with its 95% interval, and the line that the
    likeliest changes make; below, the posterior of each commit."""
    with style.drawing():
        made, (above, below) = style.panels(width, HEIGHTS, around=AROUND)
        look = style.ARMS["after"]
        for place, each in enumerate(found.commits, 1):
            if each.change is not None:
                spread = style.spread(each)
                above.errorbar(
                    place, 100 * each.change, spread, color=look.colour, marker=look.marker, capsize=2
                )
        above.plot(0, 0, look.marker, color=look.colour)
        places = {each.commit: place for place, each in enumerate(found.commits, 1)}
        level, xs, ys = 0.0, [0.0], [0.0]
        for change in found.changes:  # half way before the commit it came with
            at = (places[change.first] + places[change.last]) / 2 - 0.5
            xs += [at, at]
            after = 100 * ((1 + level / 100) * (1 + change.effect) - 1)  # each is against the level before it
            ys += [level, after]
            level = after
        above.plot([*xs, len(found.commits)], [*ys, level], color=style.MUTED, lw=1)
        above.set_ylabel("against good, %")
        above.set_title(f"{found.metric}, commit by commit after {found.good_ref}")
        skipped = [place for place, each in enumerate(found.commits, 1) if each.skipped is not None]
        above.plot(skipped, [0] * len(skipped), "x", color=style.MUTED, label="skipped")

        below.bar([*places.values()], [100 * each.posterior for each in found.commits], color=look.colour)
        below.set_ylim(0, 100)
        below.set_ylabel("posterior, %")
        named = {each.last for each in found.changes}
        ranked = sorted(
            (each for each in found.commits if each.trials),
            key=lambda each: (each.commit not in named, each.commit != found.bad, -each.posterior),
        )
        shown = [0]
        apart = len(found.commits) * INCHES / width
        for each in ranked[:LABELS]:
            place = places[each.commit]
            if all(abs(place - other) >= apart for other in shown):
                shown.append(place)
        order = [found.good, *places]
        below.set_xticks(shown, [order[each][:SHORT] for each in shown])
        below.tick_params(axis="x", rotation=30)
        above.set_xticks(shown, [""] * len(shown))
        for axes in (above, below):
            axes.set_xlim(-0.7, len(found.commits) + 0.7)
        if skipped:
            style.legend_below(made, above)
    return made
