"""Figures of stored runs, as matplotlib figures: `overlap_bench.plots.latency_cdfs(run)`.

Each is drawn of a run, which `overlap_bench.load(FOLDER)` gives; `sensitivity` of
`overlap_bench.load_sensitivity(FOLDER)`. The figures belong to no window and to no pyplot state: show one in
a notebook by ending a cell with it (after `%matplotlib inline`), or `figure.savefig("figure.pdf")`.

`width`: inches; below style.WIDE panels stand under each other and texts beside a plot are left out, so that
a figure fits a column or a phone. The arms differ by colour, marker and line, so that grey is enough. Each
function raises BadSetting, one line, where it gets something else, or the run has not got what it draws.
"""

from __future__ import annotations

from overlap_bench.harness.report.figures.changes import changes, trial_changes
from overlap_bench.harness.report.figures.delays import sensitivity
from overlap_bench.harness.report.figures.times import itl_over_time, latency_cdfs, phases

__all__ = [
    "changes",
    "itl_over_time",
    "latency_cdfs",
    "phases",
    "sensitivity",
    "trial_changes",
]
block_changes = trial_changes  # as it was called
