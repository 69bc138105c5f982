"""`bench factorial`: from what was asked to a finished run, or from a finished run to its result."""

from __future__ import annotations

from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.analysis import outputs, stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.common.machine import guess_device
from overlap_bench.harness.plan.factors import make_factorial
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.store.manifest import Manifest, read_manifest, run_of
from overlap_bench.harness.store.trust import Admit
from overlap_bench.harness.studies import measure as measure_
from overlap_bench.harness.studies.measure import Display, Source, trials


def measure(
    request: Request,
    toggles: str | None,
    resume: Path | None,
    out: Path,
    admit: Admit,
    display: Display,
    source: Source = trials,
) -> tuple[Result, bool]:
    """Measure a factorial, or go on with one; its result, and whether outputs differ that must not. Raises
    as manifest.fresh, manifest.stored and measure.measure do."""
    design = None
    if resume is None or toggles is not None or not request.nothing:
        if toggles is None:
            raise api.BadSetting("say what to vary: --toggles h2d,sync,output (bench engines lists them)")
        design = make_factorial(request, toggles, api.find_engines(), guess_device)

    if resume is not None:
        check_factorial(resume, read_manifest(resume))
    outcome = measure_.measure(run_of(design, resume, out, admit), display, source)
    return outcome.result, outcome.outputs_differ


def read(folder: Path) -> tuple[Result, bool]:
    """The same of a finished run, from its blocks. Raises StoreError where it can't be read or is not
    finished, and BadSetting where it is no factorial."""
    manifest = stored.readable(folder)
    check_factorial(folder, manifest)
    result = stored.result(folder, manifest)
    return result, outputs.outputs_differ(manifest, result)


def check_factorial(folder: Path, manifest: Manifest) -> None:
    if manifest.design.factorial is None:
        raise api.BadSetting(f"{folder} is not a factorial: its arms are not all settings of some toggles")
