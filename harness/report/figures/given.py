"""What a figure is drawn of: a run or a sweep, as it was loaded."""

from __future__ import annotations

from overlap_bench.engines import api
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.sensitivity import Sensitivity
from overlap_bench.harness.analysis.stored import check_two
from overlap_bench.harness.analysis.sweep import Sweep


def check_run(given: object) -> None:
    """Raises BadSetting for anything but a run that was loaded."""
    if not isinstance(given, Run):
        kind = type(given).__name__
        raise api.BadSetting(f"this draws a run, from overlap_bench.load(FOLDER), not a {kind}")


def check_sweep(given: object) -> None:
    """Raises BadSetting for anything but a sweep that was loaded."""
    if not isinstance(given, Sweep):
        raise api.BadSetting(
            f"this draws a sweep, from overlap_bench.load_sweep(FOLDER), not a {type(given).__name__}"
        )


def comparison_of(run: Run) -> Comparison:
    """What a run of a before and an after found, or of one arm alone. Raises BadSetting for anything else."""
    check_run(run)
    check_two(run.folder, run.manifest)
    (found,) = run.result.comparisons
    return found


def check_sensitivity(given: object) -> None:
    """Raises BadSetting for anything but what was loaded of a sensitivity."""
    if not isinstance(given, Sensitivity):
        raise api.BadSetting(
            "this draws a sensitivity, from overlap_bench.load_sensitivity(FOLDER), not a "
            f"{type(given).__name__}"
        )
