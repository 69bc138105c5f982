"""The harness from Python: what the notebooks use, and all of it public.

    import harness

    run = harness.load("results/reference/runs/overlap")  # frames: run.requests, run.steps, run.rounds
    run.result                                             # what `bench run --format json` printed
    harness.compare("results/a:before", "results/b:before")  # what `bench compare --format json` prints
    harness.plots.latency_cdfs(run)                          # a matplotlib figure, as all of harness.plots

    run = harness.load("results/a-factorial")              # run.effects: a frame of every effect
    sweep = harness.load_sweep("results/a-sweep")          # sweep.changes, sweep.values, sweep.runs

Columns with their types and units: harness.analysis.frames.COLUMNS. Metrics:
harness.metrics.definitions. The method: harness/stats/stats.md. Importing this is light; pandas and
matplotlib are loaded by what needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from harness.analysis.frames import Run
    from harness.analysis.result import Result
    from harness.analysis.sweep import Sweep
    from harness.report import figures as plots

__all__ = ["compare", "load", "load_sweep", "plots"]


def load(run: str | Path) -> Run:
    """A stored run, finished or not, as pandas frames; see frames.Run. Raises StoreError, one line, for a
    folder that is no run, is damaged, or holds no finished block."""
    from harness.analysis import frames

    return frames.load(run)


def load_sweep(sweep: str | Path) -> Sweep:
    """A stored sweep, finished or not, as pandas frames; see analysis.sweep.Sweep. Raises StoreError for a
    folder that is no sweep, is damaged, or has nothing to show yet."""
    from harness.analysis import sweep as sweeps

    return sweeps.load(sweep)


def compare(*runs: str | Path | Run) -> Result:
    """The result of `bench compare RUN... --format json`: the two arms of one run, or the first of several
    arms ("RUN", "RUN:before", "RUN:after", or a loaded run) against each other one. Change and interval are
    fractions; the metrics of a comparison are a frame by
    `pandas.DataFrame(msgspec.to_builtins(comparison.metrics)).T`. Raises
    BadSetting where they can't be compared, and StoreError where a folder can't be read."""
    from harness.analysis import across_runs

    return across_runs.compare([str(getattr(run, "folder", run)) for run in runs]).result


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "plots":
            from importlib import import_module

            return import_module("harness.report.figures")
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
