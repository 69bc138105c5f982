"""Fail a change that costs more than it may: `bench gate`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engines import api
from harness.cli import printing
from harness.cli.exit_codes import GATE_FAILED, GATE_UNDECIDED, say
from harness.cli.options import (
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    fraction,
    measuring,
    option,
)
from harness.cli.printing import Format
from harness.plan.request import Request


class OnUndecided(StrEnum):
    FAIL = "fail"
    PASS = "pass"


GATE = "Gate"


@measuring
def gate(
    request: Request,
    run: Annotated[
        Path | None, typer.Argument(help="A finished run to judge; else one is measured.", show_default=False)
    ] = None,
    base_ref: Annotated[
        str | None, option(GATE, "Git ref whose code the base runs, in a worktree of its own.")
    ] = None,
    head_ref: Annotated[
        str | None, option(GATE, "The same for the head (the code that is installed).")
    ] = None,
    metric: Annotated[
        list[str] | None, option(GATE, "Metric that must not regress; up to five (tpot_ms_p50).")
    ] = None,
    max_regression: Annotated[str | None, option(GATE, "How much worse each may get (2%).")] = None,
    on_undecided: Annotated[
        OnUndecided | None, option(GATE, "What undecided counts as; else it exits with 3.")
    ] = None,
    out: Annotated[
        Path, option(OUTPUT, "Folder of the run, of gate.md and of smaller-is-better.json (results).")
    ] = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Fail where a change makes a metric worse by more than it may: for continuous integration."""
    names, limit = metric or (), fraction(max_regression, "--max-regression")
    if run is not None and (not request.nothing or base_ref or head_ref):
        raise api.BadSetting(f"{run} is already measured: only the options of Gate and Output apply")

    from harness.cli.progress import on_stderr
    from harness.report import gate_tables
    from harness.studies import gate as gate_
    from harness.studies.gate import judge

    if run is None:
        run = gate_.measure(request, base_ref, head_ref, names, limit, out, say, on_stderr)
    result = judge(run, names, limit)
    gate_tables.write(out, result)
    printing.show(result, format)
    raise typer.Exit(_gate_code(gate_tables.gate_of(result).verdict, on_undecided))


def _gate_code(verdict: str, on_undecided: OnUndecided | None) -> int:
    said = on_undecided.value if verdict == "undecided" and on_undecided is not None else verdict
    return {"pass": 0, "fail": GATE_FAILED, "undecided": GATE_UNDECIDED}[said]
