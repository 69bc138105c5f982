"""How latencies are distributed in each arm."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from engines import api
from harness.analysis.frames import Run
from harness.metrics import requests
from harness.metrics.arrays import Floats
from harness.report.figures import style

POINTS = 400  # drawn of each curve; every one is a sample
MARKED = (50, 95, 99)
STRETCHED = 5  # largest over median value from which an axis is logarithmic
TITLES = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_token_ms": "ITL by token",
    "itl_chunk_ms": "ITL by chunk",
}
OF = {"ttft_ms": "requests", "tpot_ms": "requests", "itl_token_ms": "gaps", "itl_chunk_ms": "gaps"}


def latency_cdfs(run: Run, width: float = style.WIDTH) -> Figure:
    """Empirical distributions of TTFT, TPOT and ITL: the share of requests (of gaps, for ITL) at or below a
    latency, all blocks and rounds pooled. ITL is by token where the engine says when it had each, else by
    chunk. Pooled requests are not independent: nothing can be tested by the eye here."""
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
    scale = "ms"
    if all(each[0] > 0 for each in samples.values()) and any(
        each[-1] > STRETCHED * np.median(each) for each in samples.values()
    ):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        scale = "ms, log scale"
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_ylabel(f"{OF[name]} at or below (%)")
    axes.set_xlabel(f"{TITLES[name]} ({scale})")
