"""What a figure is drawn of: a run or a sensitivity, as it was loaded."""

from __future__ import annotations

from overlap_bench.engines import api
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.sensitivity import Sensitivity
from overlap_bench.harness.analysis.stored import check_two

LOADED = {Run: "load", Sensitivity: "load_sensitivity"}


def check(given: object, kind: type[Run | Sensitivity]) -> None:
    """Raises BadSetting for anything but what was loaded of that kind."""
    if not isinstance(given, kind):
        raise api.BadSetting(
            f"this draws a {kind.__name__.lower()}, from overlap_bench.{LOADED[kind]}(FOLDER), not a "
            f"{type(given).__name__}"
        )


def comparison_of(run: Run) -> Comparison:
    """What a run of a before and an after found, or of one arm alone. Raises BadSetting for anything else."""
    check(run, Run)
    check_two(run.folder, run.manifest)
    (found,) = run.result.comparisons
    return found
