"""ITL round by round, in the order in which they were measured: drift and disturbances show here."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engines import api
from harness.analysis.frames import KEYS, Run
from harness.report.figures import style

STATISTICS = {"p50": 0.5, "p95": 0.95}


def itl_over_time(run: Run, width: float = style.WIDTH) -> Figure:
    """Median and p95 of the gaps between the tokens of each round (in the engine, token by token), rounds in
    the order measured. A line joins the rounds of one boot; shades tell blocks apart. The axes do not start
    at zero: what matters here is what moves."""
    gaps = run.token_gaps()
    if not len(gaps):
        raise api.BadSetting(f"{run.folder} has no ITL by token: its engine does not say when it had each")
    rounds = run.rounds[[*KEYS, "started_ns"]].sort_values(["block", "started_ns"], ignore_index=True)
    rounds["place"] = rounds.index
    levels = gaps.groupby(list(KEYS))["itl_token_ms"].quantile(list(STATISTICS.values())).unstack()
    rounds = rounds.merge(levels.reset_index(), on=list(KEYS))
    with style.drawing():
        made, axes = style.panels(width, (1.9, 1.7), beside=False)
        for panel, (name, level) in zip(axes, STATISTICS.items(), strict=True):
            _blocks(panel, rounds)
            _lines(panel, rounds, run.arms, level)
            panel.set_ylabel(f"ITL {name} (ms)")
        axes[0].set_title("ITL of each round, in the order measured")
        axes[0].tick_params(axis="x", labelbottom=False)
        axes[1].set_xlabel("block (one boot of each arm)")
        style.legend_below(made, axes[0])
    return made


def _blocks(axes: Axes, rounds: pd.DataFrame) -> None:
    """Every other block shaded, and each named on the axis."""
    edges = rounds.groupby("block")["place"].agg(["min", "max"])
    for index, (start, end) in enumerate(zip(edges["min"], edges["max"], strict=True)):
        if index % 2:
            axes.axvspan(start - 0.5, end + 0.5, color=style.BAND, lw=0)
    axes.set_xticks((edges["min"] + edges["max"]) / 2, [str(block) for block in edges.index])
    axes.set_xlim(-0.5, len(rounds) - 0.5)
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0)


def _lines(axes: Axes, rounds: pd.DataFrame, arms: tuple[str, ...], level: float) -> None:
    for arm, look in style.looks(arms).items():
        mine = rounds[rounds["arm"] == arm]
        for index, (_, boot) in enumerate(mine.groupby("block")):
            axes.plot(
                boot["place"], boot[level], linestyle=look.line, color=look.colour, lw=0.9,
                marker=look.marker, markersize=3.2,
                markerfacecolor=look.face,
                label=None if index else arm,
            )  # fmt: skip
