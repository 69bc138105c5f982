"""The sources' claims: `bench experiment list`, `show`, `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overlap_bench.engines import api
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.options import (
    DESIGN,
    ENGINE,
    OUTPUT,
    RESULTS,
    Cluster,
    Debug,
    Form,
    NodesAtOnce,
    Out,
    Trust,
    admitting,
    argument,
    option,
    source_of,
)
from overlap_bench.harness.cli.printing import Format
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.plan.experiment_file import Adjusted

experiment = typer.Typer(
    help="What the sources claim, each as an experiment: what they reported beside what is measured here.",
    no_args_is_help=True,
    add_completion=False,
)


@experiment.command("list")
def list_experiments() -> None:
    """Every experiment, its question and its source."""
    from overlap_bench.harness.plan import experiment_file
    from overlap_bench.harness.report import experiment_tables

    found = [experiment_file.read(experiment_file.find(name)) for name in experiment_file.names()]
    printing.show_tables([experiment_tables.listing(found)])


@experiment.command("show")
def show_experiment(
    what: Annotated[str, argument("Name, .toml file, or the folder of a finished one.")],
    device: Annotated[str, option(ENGINE, "Device to plan for: auto, cuda or emulated (auto).")] = "auto",
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What an experiment will do and what its source reported; of a folder, what it found."""
    from overlap_bench.harness.report import experiment_tables
    from overlap_bench.harness.studies import experiment as experiments

    if Path(what).is_dir():
        outcome = experiments.show(Path(what))
        printing.end_with(outcome.result, format, outcome.outputs_differ)
    if format is not Format.TABLE:
        raise api.BadSetting("--format is for what a finished experiment found: show its folder")
    planned = experiments.plan(what, Adjusted(device=device))
    printing.show_tables(list(experiment_tables.plan(planned)))


@experiment.command("run")
def run_experiment(
    name: Annotated[str | None, argument("Name, or .toml file; bench experiment list.")] = None,
    blocks: Annotated[
        int | None, option(DESIGN, "Trials, at least 4 (as the experiment says).", "--trials")
    ] = None,
    rounds: Annotated[
        int | None, option(DESIGN, "Rounds of each workload in a boot (as the experiment says).")
    ] = None,
    seed: Annotated[int | None, option(DESIGN, "Seed of workload order, prompts and arrivals (0).")] = None,
    device: Annotated[str | None, option(ENGINE, "auto, cuda or emulated (auto).")] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of an experiment to go on with.")] = None,
    trust: Trust = False,
    ray: Cluster = None,
    nodes_at_once: NodesAtOnce = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Run an experiment, and lay what its source reported beside what is measured here."""
    from overlap_bench.harness.cli.progress import on_stderr
    from overlap_bench.harness.plan import experiment_file
    from overlap_bench.harness.studies import experiment as experiments

    asked = [name, blocks, rounds, seed, device]
    if resume is not None and any(each is not None for each in asked):
        raise api.BadSetting(f"{resume} records what to run: with --resume, leave name and options out")
    if resume is None and name is None:
        raise api.BadSetting("say which experiment to run: bench experiment list has their names")
    file = Path(name) if name is not None and experiment_file.is_own(name) else None
    admitted = admitting(trust, resume or file)
    source = source_of(ray, nodes_at_once, trust)
    with interruptible():
        if resume is not None:
            outcome = experiments.resume(resume, on_stderr, admitted, source)
        else:
            adjusted = Adjusted(device=device or "auto", blocks=blocks, rounds=rounds, seed=seed or 0)
            planned = experiments.plan(name or "", adjusted, admitted)
            outcome = experiments.run(planned, out, on_stderr, source)
    printing.end_with(outcome.result, format, outcome.outputs_differ)
