"""Results from Python, which programs and notebooks import from `overlap_bench`; all of it is public.

    import overlap_bench

    run = overlap_bench.load("results/reference/runs/overlap")  # frames: run.requests, run.steps, run.rounds
    run.result                                              # what `bench run --format json` printed
    overlap_bench.compare("results/a:before", "results/b:before")  # what `bench compare --format json` prints
    overlap_bench.plots.latency_cdfs(run)                   # a matplotlib figure, as all of plots

    run = overlap_bench.load("results/a-factorial")         # run.effects: a frame of every effect
    sweep = overlap_bench.load_sweep("results/a-sweep")     # sweep.changes, sweep.values, sweep.runs
    found = overlap_bench.load_sensitivity("results/a-sensitivity")  # found.phases; plots.sensitivity(found)

Columns with their types and units: harness/analysis/frames.py, COLUMNS. Metrics:
harness/metrics/definitions.py. The method: harness/stats/stats.md. Importing this is light; pandas and
matplotlib are loaded by what needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from overlap_bench.harness.analysis.frames import Run
    from overlap_bench.harness.analysis.result import Result
    from overlap_bench.harness.analysis.sensitivity import Sensitivity
    from overlap_bench.harness.analysis.sweep import Sweep
    from overlap_bench.harness.report import figures as plots

__all__ = ["compare", "load", "load_sensitivity", "load_sweep", "plots"]


def load(run: str | Path) -> Run:
    """A stored run, finished or not, as pandas frames; see frames.Run. Raises StoreError, one line, for a
    folder that is no run, is damaged, or holds no finished trial."""
    from overlap_bench.harness.analysis import frames

    return frames.load(run)


def load_sensitivity(folder: str | Path) -> Sensitivity:
    """What `bench sensitivity` left in a folder; see sensitivity.Sensitivity. Raises StoreError, one line."""
    from overlap_bench.harness.analysis import sensitivity

    return sensitivity.read(folder)


def load_sweep(sweep: str | Path) -> Sweep:
    """A stored sweep, finished or not, as pandas frames; see analysis.sweep.Sweep. Raises StoreError for a
    folder that is no sweep, is damaged, or has nothing to show yet."""
    from overlap_bench.harness.analysis import sweep as sweeps

    return sweeps.load(sweep)


def compare(*runs: str | Path | Run) -> Result:
    """The result of `bench compare RUN... --format json`: the two arms of one run, or the first of several
    arms ("RUN", "RUN:before", "RUN:after", or a loaded run) against each other one. Change and interval are
    fractions; the metrics of a comparison are a frame by
    `pandas.DataFrame(msgspec.to_builtins(comparison.metrics)).T`. Raises
    BadSetting where they can't be compared, and StoreError where a folder can't be read."""
    from overlap_bench.harness.analysis import across_runs

    return across_runs.compare([str(getattr(run, "folder", run)) for run in runs]).result


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "plots":
            from overlap_bench.harness.report import figures

            return figures
        raise AttributeError(f"module 'harness' has no attribute {name!r}")


if __name__ == "harness":
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("overlap_bench") is None:  # installed in place before there was such a package
        sys.path.append(str(Path(__file__).resolve().parents[1]))
    from overlap_bench.old_names import give_way

    give_way(__name__)
