"""What took how long: latencies as distributions and round by round, and the host's phases of a decode
step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from overlap_bench.engines import api
from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.frames import KEYS, Run
from overlap_bench.harness.analysis.result import MetricRow
from overlap_bench.harness.common import formatting
from overlap_bench.harness.common.intervals import Floats
from overlap_bench.harness.metrics import definitions, requests
from overlap_bench.harness.report.figures import style
from overlap_bench.harness.report.figures.given import check, comparison_of

POINTS = 400  # drawn of each curve; every one is a sample
MARKED = (50, 95, 99)
DECADE = 10  # an axis over less has more ticks in it, or it would have two
STRETCHED = 5  # largest over median value from which an axis is logarithmic
TITLES = {  # and what is counted
    "ttft_ms": ("TTFT", "requests"),
    "tpot_ms": ("TPOT", "requests"),
    "itl_token_ms": ("ITL by token", "gaps"),
    "itl_chunk_ms": ("ITL by chunk", "gaps"),
}
STATISTICS = {"p50": 0.5, "p95": 0.95}
ROW, HEAD = 0.42, 0.75  # inches: of a phase, and of what stands around a panel
PHASES = {
    False: "Host work per decode step",
    True: "Waits per decode step (mostly for the device; another scale)",
}


def latency_cdfs(run: Run, width: float = style.WIDTH) -> Figure:
    """Empirical distributions of TTFT, TPOT and ITL: the share of requests (of gaps, for ITL) at or below a
    latency, all trials and rounds pooled. ITL is by token where the engine says when it had each, else by
    chunk. Pooled requests are not independent: nothing can be tested by the eye here."""
    check(run, Run)
    served = run.requests[run.requests.error == ""]
    samples = {arm: requests.distributions(served[served["arm"] == arm]) for arm in run.arms}
    itl = "itl_token_ms" if all(each["itl_token_ms"].size for each in samples.values()) else "itl_chunk_ms"
    names = [
        name for name in ("ttft_ms", "tpot_ms", itl) if all(each[name].size for each in samples.values())
    ]
    if not names:
        raise api.BadSetting(f"{run.folder} has no request with a token in every arm")
    with style.drawing():
        made, axes = style.panels(width, (2.6,) * len(names), beside=width >= style.WIDE)
        for panel, name in zip(axes, names, strict=True):
            _curves(panel, {arm: np.sort(each[name]) for arm, each in samples.items()}, name)
        axes[0].plot([], [], "o", color=style.MUTED, markersize=4, label="p50, p95, p99 (marked)")
        style.legend_below(made, axes[0])
    return made


def _curves(axes: Axes, samples: dict[str, Floats], name: str) -> None:
    for arm, look in style.looks(list(samples)).items():
        ordered = samples[arm]
        chosen = np.unique(np.linspace(0, ordered.size - 1, POINTS).round().astype(int))
        shares = (chosen + 1) / ordered.size
        axes.step(ordered[chosen], shares, linestyle=look.line, where="post", color=look.colour, label=arm)
        axes.plot(
            np.percentile(ordered, MARKED), [level / 100 for level in MARKED], look.marker,
            color=look.colour, markerfacecolor=look.face,
        )  # fmt: skip
    (title, counted), scale = TITLES[name], "ms"
    if all(each[0] > 0 for each in samples.values()) and any(
        each[-1] > STRETCHED * np.median(each) for each in samples.values()
    ):
        axes.set_xscale("log")
        low, high = (pick(each[place] for each in samples.values()) for pick, place in ((min, 0), (max, -1)))
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5)) if high > DECADE * low else LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7))
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        scale = "ms, log scale"
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_ylabel(f"{counted} at or below (%)")
    axes.set_xlabel(f"{title} ({scale})")


def itl_over_time(run: Run, width: float = style.WIDTH) -> Figure:
    """Median and p95 of the gaps between the tokens of each round (in the engine, token by token), rounds in
    the order measured. A line joins the rounds of one boot; shades tell trials apart. The axes do not start
    at zero: what matters here is what moves."""
    check(run, Run)
    rounds = _levels(run)
    with style.drawing():
        made, axes = style.panels(width, (1.9, 1.7))
        for panel, name in zip(axes, STATISTICS, strict=True):
            _blocks(panel, rounds)
            for arm, look in style.looks(run.arms).items():
                boots = rounds[rounds["arm"] == arm].groupby("trial")
                for index, (_, boot) in enumerate(boots):
                    points = list(zip(boot["place"], boot[name], strict=True))
                    style.line(panel, points, look, lw=0.9, markersize=3.2, label=None if index else arm)
            panel.set_ylabel(f"ITL {name} (ms)")
        axes[0].set_title("ITL of each round, in the order measured")
        axes[0].tick_params(axis="x", labelbottom=False)
        axes[1].set_xlabel("trial (one boot of each arm)")
        style.legend_below(made, axes[0])
    return made


def _levels(run: Run) -> pd.DataFrame:
    """STATISTICS of the gaps of each round, ms, and its `place` in the order measured."""
    served = run.requests.loc[run.requests["error"] == "", [*KEYS, "token_ns"]]
    gaps = {key: requests.gaps_ms(stamps) for key, stamps in served.groupby(list(KEYS))["token_ns"]}
    if not any(each.size for each in gaps.values()):
        raise api.BadSetting(f"{run.folder} has no ITL by token: its engine does not say when it had each")
    measured = run.rounds[[*KEYS, "started_ns"]].sort_values(["trial", "started_ns"])[list(KEYS)]
    rows = [
        (place, *key, *np.quantile(gaps[key], list(STATISTICS.values())))
        for place, key in enumerate(measured.itertuples(index=False, name=None))
        if key in gaps and gaps[key].size
    ]
    return pd.DataFrame(rows, columns=["place", *KEYS, *STATISTICS])


def _blocks(axes: Axes, rounds: pd.DataFrame) -> None:
    """Every other trial shaded, and each named on the axis. A round without points keeps its place."""
    edges = rounds.groupby("trial")["place"].agg(["min", "max"])
    for index, (start, end) in enumerate(zip(edges["min"], edges["max"], strict=True)):
        if index % 2:
            axes.axvspan(start - 0.5, end + 0.5, color=style.BAND, lw=0)
    axes.set_xticks((edges["min"] + edges["max"]) / 2, [str(block) for block in edges.index])
    axes.set_xlim(-0.5, rounds["place"].max() + 0.5)
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0)


def phases(run: Run, width: float = style.WIDTH) -> Figure:
    """Mean of each host phase per decode step, us: zero-based bars, work and waits apart, since a wait for
    the device dwarfs the rest. Phases may run at the same time in two threads, so they are not stacked.
    Beside each pair: the difference and its interval, from the result."""
    comparison = comparison_of(run)
    rows = {
        phase: comparison.metrics[definitions.phase_metric(phase)]
        for phase in api.PHASES
        if definitions.phase_metric(phase) in comparison.metrics
    }
    seen = {phase: row for phase, row in rows.items() if row.before or row.after}
    groups = {wait: [name for name in seen if name.startswith("wait.") == wait] for wait in (False, True)}
    groups = {wait: names for wait, names in groups.items() if names}
    if not groups:
        raise api.BadSetting(f"{run.folder} has no step records, so no phases")
    sides = ("before",) if comparison.after is None else ("before", "after")
    with style.drawing():
        heights = tuple(HEAD + ROW * len(names) for names in groups.values())
        made, axes = style.panels(width, heights, around=HEAD)
        for panel, (wait, names) in zip(axes, groups.items(), strict=True):
            _bars(panel, {name: seen[name] for name in names}, sides, full=width >= style.WIDE)
            panel.set_title(PHASES[wait] if width >= style.WIDE else PHASES[wait].partition(" (")[0])
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
