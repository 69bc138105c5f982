"""Measure and compare: `bench run`, `aa`, `rerun`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from engines import api
from harness.cli import printing
from harness.cli.exit_codes import OUTPUTS_DIFFER, say
from harness.cli.options import (
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    Trust,
    admitting,
    measuring,
    option,
)
from harness.cli.printing import Format
from harness.common.signals import interruptible
from harness.plan.request import Request
from harness.plan.settings import make_design


@measuring
def run(
    request: Request,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a run to go on with.")] = None,
    trust: Trust = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare a before with an after, in blocks of fresh boots; or measure one arm alone."""
    _measure(request, out, resume, trust, format)


@measuring
def aa(request: Request, out: Out = RESULTS, format: Form = Format.TABLE, debug: Debug = False) -> None:
    """Measure an arm against itself: this machine's noise floor, and the smallest effect it can detect."""
    _measure(msgspec.structs.replace(request, against_itself=True), out, None, False, format)


def rerun(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)],
    out: Out = RESULTS,
    trust: Trust = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a stored run again, as its manifest says."""
    from harness.cli.progress import on_stderr
    from harness.store.manifest import read_manifest
    from harness.studies import measure

    manifest = read_manifest(run)
    if manifest.imported is not None:
        raise api.BadSetting(
            f"{run} is imported from {manifest.imported.tool}: only that can measure it again"
        )
    known = api.find_engines()
    for arm in manifest.design.arms:
        api.pick(arm.engine, known, "engine").check(arm.toggles)
    made_here = admitting(trust, run)(run, [manifest.design], manifest.signature)
    for line in measure.differences_from(manifest):
        say(f"unlike {manifest.run}: {line}")
    with interruptible():
        outcome = measure.measure(manifest.design, out, on_stderr, made_here=made_here)
    printing.show(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


def compare(
    runs: Annotated[list[str], typer.Argument(help="RUN, or RUN:before or RUN:after.", show_default=False)],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare stored runs, or the arms of one; what was not interleaved gets no verdict."""
    from harness.analysis import across_runs

    compared = across_runs.compare(runs)
    printing.show(compared.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if compared.outputs_differ else 0)


def _measure(request: Request, out: Path, resume: Path | None, trusted: bool, format: Format) -> None:
    from harness.common.machine import guess_device
    from harness.plan.variants import load_variants

    admitted = admitting(trusted, resume)
    design = None
    if resume is not None and not request.nothing and not (request.variant or request.engine):
        raise api.BadSetting("--resume goes on with a run as it was asked for: leave the other options out")
    if resume is None or not request.nothing:
        design = make_design(request, api.find_engines(), load_variants(), guess_device)

    from harness.cli.progress import on_stderr
    from harness.studies import measure

    if resume is not None:
        outcome = measure.resume(resume, design, on_stderr, admitted)
    else:
        assert design is not None
        outcome = measure.measure(design, out, on_stderr)
    printing.show(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)
