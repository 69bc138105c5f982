"""Several toggles or settings at once: `bench factorial`, `bench sweep`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engines import api
from harness.cli import printing
from harness.cli.exit_codes import OUTPUTS_DIFFER, say
from harness.cli.options import (
    DESIGN,
    OF_TWO_ARMS,
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
from harness.plan.request import Request


@partial(measuring, without=OF_TWO_ARMS)
def factorial(
    request: Request,
    run: Annotated[
        Path | None, typer.Argument(help="A finished factorial to show again.", show_default=False)
    ] = None,
    toggles: Annotated[
        str | None,
        option(DESIGN, "Toggles to vary: NAME, or NAME=BEFORE:AFTER, joined by commas.", metavar="A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a factorial to go on with.")] = None,
    trust: Trust = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What each of several toggles gives, alone and with the others: all their settings in one run, of the
    engine overlap unless you say otherwise."""
    from harness.cli.progress import on_stderr
    from harness.studies import factorial as factorial_run

    if run is None:
        admit = admitting(trust, resume)
        result, outputs_differ = factorial_run.measure(request, toggles, resume, out, admit, on_stderr)
    elif request.nothing and toggles is None and resume is None:
        result, outputs_differ = factorial_run.read(run)
    else:
        raise api.BadSetting(f"{run} is already measured: only --format applies")
    printing.show(result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)


@measuring
def sweep(
    request: Request,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP]", help="A sweep to show again.", show_default=False)
    ] = None,
    over: Annotated[
        list[str] | None,
        option(DESIGN, "Setting and its values; once for each axis of the grid.", metavar="NAME=A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a sweep to go on with.")] = None,
    trust: Trust = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a grid of runs one after the other: a workload option, a variant, a toggle, at each value."""
    from harness.analysis.sweep import result as found_in
    from harness.cli.progress import on_stderr
    from harness.studies import sweep as sweep_

    if folder is None:
        admit = admitting(trust, resume)
        folder = sweep_.measure(request, over or (), resume, out, say, admit, on_stderr)
    elif not request.nothing or over or resume is not None:
        raise api.BadSetting(f"{folder} is already measured: only --format applies")
    result, outputs_differ = found_in(folder)
    printing.show(result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)
