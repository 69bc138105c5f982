"""Measure and compare: `bench run`, `aa`, `rerun`, `compare`, `gate`, `factorial`, `sweep`."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from overlap_bench.engines import api
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.options import (
    DESIGN,
    OF_TWO_ARMS,
    OUTPUT,
    RESULTS,
    Cluster,
    Debug,
    Form,
    NodesAtOnce,
    Out,
    Trust,
    Whole,
    admitting,
    argument,
    check_cluster,
    measuring,
    option,
    source_of,
)
from overlap_bench.harness.cli.printing import GATE_FAILED, GATE_UNDECIDED, OUTPUTS_DIFFER, Format, say
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.plan.request import GateRequest, Request
from overlap_bench.harness.plan.settings import make_design

if TYPE_CHECKING:
    from overlap_bench.harness.studies.measure import Source


@measuring
def run(
    request: Request,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a run to go on with.")] = None,
    trust: Trust = False,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    whole: Whole = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare a before with an after, both in fresh processes in each trial; or measure one arm alone."""
    _measure(request, out, resume, trust, source_of(ray, nodes_at_once, trust), format, whole)


@measuring
def aa(
    request: Request,
    out: Out = RESULTS,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    whole: Whole = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure an arm against itself: this machine's noise floor, and the smallest effect it can detect."""
    request = msgspec.structs.replace(request, against_itself=True)
    _measure(request, out, None, False, source_of(ray, nodes_at_once), format, whole)


def _measure(
    request: Request,
    out: Path,
    resume: Path | None,
    trusted: bool,
    source: Source,
    format: Format,
    whole: bool,
) -> None:
    from overlap_bench.harness.common.machine import guess_device
    from overlap_bench.harness.plan.variants import load_variants

    admitted = admitting(trusted, resume)
    design = None
    if resume is not None and not request.nothing and not (request.variant or request.engine):
        raise api.BadSetting("--resume goes on with a run as it was asked for: leave the other options out")
    if resume is None or not request.nothing:
        design = make_design(request, api.find_engines(), load_variants(), guess_device)

    from overlap_bench.harness.cli.progress import on_stderr
    from overlap_bench.harness.store.manifest import run_of
    from overlap_bench.harness.studies import measure

    outcome = measure.measure(run_of(design, resume, out, admitted), on_stderr, source)
    printing.show(outcome.result, format, whole)
    folder = shlex.quote(str(outcome.folder))
    say(f"next: bench report {folder} (a page), bench explain {folder} (where a step's time goes)")
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


def rerun(
    run: Annotated[Path, argument("Folder of a run.")],
    out: Out = RESULTS,
    trust: Trust = False,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    whole: Whole = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a stored run again, as its manifest says."""
    from overlap_bench.harness.cli.progress import on_stderr
    from overlap_bench.harness.run.hosts import engines_of
    from overlap_bench.harness.store.manifest import check_same_data, differences_from, fresh, read_manifest
    from overlap_bench.harness.studies import measure

    source = source_of(ray, nodes_at_once, trust)
    manifest = read_manifest(run)
    if manifest.imported is not None:
        raise api.BadSetting(
            f"{run} is imported from {manifest.imported.tool}: only that can measure it again"
        )
    made_here = admitting(trust, run)(run, [manifest.design], manifest.signature)
    known = engines_of([arm.ref for arm in manifest.design.arms])
    for arm in manifest.design.arms:
        api.pick(arm.engine, known, "engine").check(arm.toggles)
    check_same_data(manifest)
    for line in differences_from(manifest):
        say(f"unlike {manifest.run}: {line}")
    with interruptible():
        again = fresh(manifest.design, out, made_here=made_here)
        outcome = measure.measure(again, on_stderr, source)
    printing.end_with(outcome.result, format, outcome.outputs_differ, whole)


def compare(
    runs: Annotated[list[str], argument("RUN, or RUN:before or RUN:after.")],
    whole: Whole = False,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Print a stored run again, or compare several; what was not interleaved gets no verdict."""
    from overlap_bench.harness.analysis import across_runs

    compared = across_runs.compare(runs)
    printing.end_with(compared.result, format, compared.outputs_differ, whole)


@measuring
def gate(
    request: Request,
    asked: GateRequest,
    run: Annotated[Path | None, argument("A finished run to judge; else one is measured.")] = None,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    whole: Whole = False,
    out: Annotated[
        Path, option(OUTPUT, "Folder of the run and of gate.md, calibration.json, … (results).")
    ] = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Fail where a change makes a metric worse by more than it may: for continuous integration."""
    asked.check(request, run, on_cluster=ray is not None)

    from overlap_bench.harness.cli.progress import on_stderr
    from overlap_bench.harness.report import gate_tables
    from overlap_bench.harness.studies import gate as gate_

    if asked.calibrate:
        from overlap_bench.harness.report import gate_plan_tables

        plans = gate_.calibrate(request, asked, out, on_stderr)
        gate_plan_tables.write(out, plans)
        printing.show(plans, format)
        return
    if run is None:
        request, asked = gate_.as_planned(request, asked)
        run = gate_.measure(request, asked, out, say, on_stderr, source_of(ray, nodes_at_once))
    result = gate_.judge(run, asked.metric, asked.max_regression)
    if asked.history is not None:
        result = gate_.remember(result, run, asked.history)
    gate_tables.write(out, result)
    printing.show(result, format, whole)
    verdict = gate_tables.gate_of(result).verdict
    if verdict == "undecided" and asked.on_undecided is not None:
        verdict = asked.on_undecided.value
    raise typer.Exit({"pass": 0, "fail": GATE_FAILED, "undecided": GATE_UNDECIDED}[verdict])


@partial(measuring, without=OF_TWO_ARMS)
def factorial(
    request: Request,
    run: Annotated[Path | None, argument("A finished factorial to show again.")] = None,
    toggles: Annotated[
        str | None,
        option(DESIGN, "Toggles to vary: NAME, or NAME=BEFORE:AFTER, joined by commas.", metavar="A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a factorial to go on with.")] = None,
    trust: Trust = False,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What each of several toggles gives, alone and with the others: all their settings in one run, of the
    engine overlap unless you say otherwise."""
    from overlap_bench.harness.cli.progress import on_stderr
    from overlap_bench.harness.studies import factorial as factorial_run

    if run is None:
        admit = admitting(trust, resume)
        source = source_of(ray, nodes_at_once, trust)
        result, outputs_differ = factorial_run.measure(
            request, toggles, resume, out, admit, on_stderr, source
        )
    elif not request.nothing or any((toggles, resume, trust, ray, nodes_at_once)):
        raise api.BadSetting(f"{run} is already measured: only --format applies")
    else:
        result, outputs_differ = factorial_run.read(run)
    printing.end_with(result, format, outputs_differ)


@measuring
def sweep(
    request: Request,
    folder: Annotated[Path | None, argument("A sweep to show again.", metavar="[SWEEP]")] = None,
    over: Annotated[
        list[str] | None,
        option(DESIGN, "Setting and its values; once for each axis of the grid.", metavar="NAME=A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a sweep to go on with.")] = None,
    trust: Trust = False,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a grid of runs: a workload option, a variant, a toggle, at each value."""
    from overlap_bench.harness.analysis.sweep import result as found_in
    from overlap_bench.harness.cli.progress import among_others, on_stderr
    from overlap_bench.harness.run.cluster import driver
    from overlap_bench.harness.studies import sweep as sweep_

    check_cluster(ray, nodes_at_once, trust)

    if folder is None:
        admit = admitting(trust, resume)
        cluster = None
        if ray is not None:
            cluster = sweep_.Cluster(partial(driver.joined, ray, nodes_at_once), among_others)
        folder = sweep_.measure(request, over or (), resume, out, say, admit, on_stderr, cluster)
    elif not request.nothing or any((over, resume, trust, ray, nodes_at_once)):
        raise api.BadSetting(f"{folder} is already measured: only --format applies")
    result, outputs_differ = found_in(folder)
    printing.end_with(result, format, outputs_differ)
