"""`bench factorial`: from what was asked to a finished run, or from a finished run to its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines import api
from harness.factorial_design import make_factorial
from harness.machine import guess_device
from harness.settings import Asked

if TYPE_CHECKING:
    from harness.store import Manifest


def measure(asked: Asked, toggles: str | None, resume: Path | None, out: Path) -> tuple[dict[str, Any], bool]:
    """Measure a factorial, or go on with one; its result, and whether outputs differ that must not. Raises
    as measure.measure and measure.resume do."""
    design = None
    if resume is None or toggles is not None or not asked.nothing:
        if toggles is None:
            raise api.BadSetting("say what to vary: --toggles h2d,sync,output (bench engines lists them)")
        design = make_factorial(asked, toggles, api.find_engines(), guess_device)

    from harness import measure as runs
    from harness import store
    from harness.progress import on_stderr

    if resume is not None:
        check_factorial(resume, store.read_manifest(resume))
        outcome = runs.resume(resume, design, on_stderr)
    else:
        assert design is not None
        outcome = runs.measure(design, out, on_stderr)
    return outcome.result, outcome.outputs_differ


def read(folder: Path) -> tuple[dict[str, Any], bool]:
    """The same of a finished run, from its blocks. Raises StoreError where it can't be read or is not
    finished, and BadSetting where it is no factorial."""
    from harness import across_runs
    from harness import measure as runs

    manifest = across_runs.readable(folder)
    check_factorial(folder, manifest)
    result = across_runs.result(folder, manifest)
    return result, runs.outputs_differ(manifest, result)


def check_factorial(folder: Path, manifest: Manifest) -> None:
    """Raises BadSetting for another kind of run."""
    if manifest.design.factorial is None:
        raise api.BadSetting(f"{folder} is not a factorial: its arms are not all settings of some toggles")
