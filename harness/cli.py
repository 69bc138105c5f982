"""The command `bench`. Each command is a thin call into the rest; heavy imports wait until one needs them.

How it ends, and with which exit code, is in exits.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from engines import api
from harness import exits, printing
from harness.exits import GATE_FAILED, GATE_UNDECIDED, OUTPUTS_DIFFER, say
from harness.interruption import interruptible
from harness.options import (
    DESIGN,
    ENGINE,
    OF_A_MEASUREMENT,
    OF_A_VERDICT,
    OF_TWO_ARMS,
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    fraction,
    given,
    measuring,
    option,
)
from harness.printing import Format
from harness.settings import Asked, make_design

app = typer.Typer(
    help="Does this overlap optimization really help, by how much, and how sure are we?",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a docstring
    pretty_exceptions_enable=False,
)


@app.command()
@measuring
def run(
    asked: Asked,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a run to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare a before with an after, in blocks of fresh boots; or measure one arm alone."""
    _measure(asked, out, resume, format)


@app.command()
@measuring
def aa(asked: Asked, out: Out = RESULTS, format: Form = Format.TABLE, debug: Debug = False) -> None:
    """Measure an arm against itself: this machine's noise floor, and the smallest effect it can detect."""
    _measure(replace(asked, against_itself=True), out, None, format)


def _measure(asked: Asked, out: Path, resume: Path | None, format: Format) -> None:
    from harness.machine import guess_device
    from harness.variants import load_variants

    design = None
    if resume is not None and not asked.nothing and not (asked.variant or asked.engine):
        raise api.BadSetting("--resume goes on with a run as it was asked for: leave the other options out")
    if resume is None or not asked.nothing:
        design = make_design(asked, api.find_engines(), load_variants(), guess_device)

    from harness import measure
    from harness.progress import on_stderr

    if resume is not None:
        outcome = measure.resume(resume, design, on_stderr)
    else:
        assert design is not None
        outcome = measure.measure(design, out, on_stderr)
    printing.show(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="RUN, or RUN:before or RUN:after.", show_default=False)],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare stored runs, or the arms of one; what was not interleaved gets no verdict."""
    from harness import across_runs

    compared = across_runs.compare(runs)
    printing.show(compared.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if compared.outputs_differ else 0)


@app.command()
def rerun(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", show_default=False)],
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a stored run again, as its manifest says."""
    from harness import measure, store
    from harness.progress import on_stderr

    manifest = store.read_manifest(run)
    if manifest.imported is not None:
        raise api.BadSetting(
            f"{run} is imported from {manifest.imported.tool}: only that can measure it again"
        )
    known = api.find_engines()
    for arm in manifest.design.arms:
        api.pick(arm.engine, known, "engine").check(arm.toggles)
    for line in measure.differences_from(manifest):
        say(f"unlike {manifest.run}: {line}")
    with interruptible():
        outcome = measure.measure(manifest.design, out, on_stderr)
    printing.show(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


class GraphTrace(StrEnum):
    GRAPH = "graph"
    NODE = "node"


PROFILE = "Profile"


@app.command()
@partial(measuring, without=OF_A_VERDICT)
def profile(
    asked: Asked,
    steps: Annotated[int | None, option(PROFILE, "Steps of the window (24).")] = None,
    nsys: Annotated[
        str | None, option(PROFILE, "Path of nsys, if it is not on PATH or there is no GPU.")
    ] = None,
    graph_trace: Annotated[
        GraphTrace | None,
        option(PROFILE, "nsys: a row per CUDA graph, or per node of it, which slows it down (graph)."),
    ] = None,
    print_command: Annotated[
        bool, option(PROFILE, "Print the nsys command of each arm and end.", "--print-command")
    ] = False,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Look closely at a short window of steady decode: a timeline of each arm, a picture, and with nsys its
    reports. Where time goes, not how much: profiled times are never compared."""
    from harness.machine import guess_device
    from harness.variants import load_variants

    design = make_design(asked, api.find_engines(), load_variants(), guess_device)

    from harness import profiling

    profiling.check(steps)
    wanted = profiling.STEPS if steps is None else steps
    graph = (graph_trace or GraphTrace.GRAPH).value
    if print_command:
        sys.stdout.write(profiling.printed(profiling.Nsys(nsys or "nsys", graph), design, wanted, out))
        return
    device = design.arms[0].options.device
    found = profiling.find_nsys(nsys, guess_device() if device == "auto" else device)
    if found is None and graph_trace is not None:
        raise api.BadSetting("--graph-trace applies only with nsys; give --nsys PATH")
    tool = None if found is None else profiling.Nsys(found, graph)
    profiled = profiling.profile(design, wanted, tool, out, say)
    _show_traces(profiled.traces, format)
    say(f"the traces open in ui.perfetto.dev; the picture is {profiled.picture}")


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Where each decode step's interval goes, what made late requests late, and what was to be expected."""
    from harness import explain_tables
    from harness.explain import explain as explain_run

    found = explain_run(run)
    printing.show_page(found, format, explain_tables.to_csv, explain_tables.page)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[
        Path, option(OUTPUT, "File to write: .html, or .md for a pull request (report.html).", "-o", "--out")
    ] = Path("report.html"),
    debug: Debug = False,
) -> None:
    """Write what a run found as one file: a web page that needs nothing else, or markdown."""
    from harness import report as reports

    reports.write(run, out)
    sys.stdout.write(f"{out}\n")


class OnUndecided(StrEnum):
    FAIL = "fail"
    PASS = "pass"


GATE = "Gate"


@app.command()
@measuring
def gate(
    asked: Asked,
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
    if run is not None and (not asked.nothing or base_ref or head_ref):
        raise api.BadSetting(f"{run} is already measured: only the options of Gate and Output apply")

    from harness import gate_run

    if run is None:
        run = gate_run.measure(asked, base_ref, head_ref, names, limit, out, say)
    result = gate_run.judge(run, names, limit)
    gate_run.write(out, result)
    printing.show(result, format)
    raise typer.Exit(_gate_code(result["gate"]["verdict"], on_undecided))


def _gate_code(verdict: str, on_undecided: OnUndecided | None) -> int:
    said = on_undecided.value if verdict == "undecided" and on_undecided is not None else verdict
    return {"pass": 0, "fail": GATE_FAILED, "undecided": GATE_UNDECIDED}[said]


@app.command()
def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="SQLite export of nsys, or Chrome trace (.json, .json.gz); two: before and after.",
            show_default=False,
        ),
    ],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Where the time goes in a trace: busy and idle, ranges, copies, synchronizations, kernels, launches."""
    if len(files) > 2:
        raise api.BadSetting(f"trace takes one file, or two as before and after, not {len(files)}")
    _show_traces(files, format)


def _show_traces(files: Sequence[Path], format: Format) -> None:
    """What is in the trace of one arm, or of a before and an after."""
    from harness.trace import analysis, report, trace_file
    from harness.trace.progress import on_stderr

    analysed: list[report.Analysed] = []
    with interruptible(), on_stderr() as progress:
        for file in files:
            found = trace_file.read(file, progress)
            analysed.append((found, analysis.analyse(found, progress)))
    result = report.result(analysed[0], analysed[1] if len(files) == 2 else None)
    printing.show_page(result, format, report.to_csv, report.page)


@app.command()
def variants(
    name: Annotated[str | None, typer.Argument(help="One variant, in full.", show_default=False)] = None,
) -> None:
    """The named before/after pairs: what each changes, its source, and what to expect where."""
    from harness import listings
    from harness.consoles import Console
    from harness.variants import load_variants

    found, console = load_variants(), Console(highlight=False)
    if name is None:
        console.print(listings.variants(found, console.width))
    else:
        chosen = api.pick(name, found, "variant")
        console.print(listings.variant(chosen, api.find_engines(), console.width))


@app.command()
def engines(
    name: Annotated[str | None, typer.Argument(help="One engine instead of all.", show_default=False)] = None,
) -> None:
    """Every installed engine, or one, and its toggles."""
    from harness import listings
    from harness.consoles import Console

    found = api.find_engines()
    chosen = found if name is None else {name: api.pick(name, found, "engine")}
    console = Console(highlight=False)
    console.print(*listings.engines(chosen, console.width), sep="\n")


@app.command()
def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from harness import doctor as checks
    from harness import listings
    from harness.consoles import Console

    console = Console(highlight=False)
    console.print(listings.checkup(checks.examine(), console.width))


@app.command()
@partial(measuring, without=OF_TWO_ARMS)
def factorial(
    asked: Asked,
    run: Annotated[
        Path | None, typer.Argument(help="A finished factorial to show again.", show_default=False)
    ] = None,
    toggles: Annotated[
        str | None,
        option(DESIGN, "Toggles to vary: NAME, or NAME=BEFORE:AFTER, joined by commas.", metavar="A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a factorial to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What each of several toggles gives, alone and with the others: all their settings in one run, of the
    engine overlap unless you say otherwise."""
    from harness import factorial_run

    if run is None:
        result, outputs_differ = factorial_run.measure(asked, toggles, resume, out)
    elif asked.nothing and toggles is None and resume is None:
        result, outputs_differ = factorial_run.read(run)
    else:
        raise api.BadSetting(f"{run} is already measured: only --format applies")
    printing.show(result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)


@app.command()
@measuring
def sweep(
    asked: Asked,
    folder: Annotated[
        Path | None, typer.Argument(metavar="[SWEEP]", help="A sweep to show again.", show_default=False)
    ] = None,
    over: Annotated[
        list[str] | None,
        option(DESIGN, "Setting and its values; once for each axis of the grid.", metavar="NAME=A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of a sweep to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a grid of runs one after the other: a workload option, a variant, a toggle, at each value."""
    from harness import sweep_run, sweep_tables

    if folder is None:
        folder = sweep_run.measure(asked, over or (), resume, out, say)
    elif not asked.nothing or over or resume is not None:
        raise api.BadSetting(f"{folder} is already measured: only --format applies")
    result, outputs_differ = sweep_run.result(folder)
    printing.show_page(result, format, sweep_tables.to_csv, sweep_tables.page)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)


experiment = typer.Typer(
    help="What the sources claim, each as an experiment: what they reported beside what is measured here.",
    no_args_is_help=True,
)
app.add_typer(experiment, name="experiment")


@experiment.command("list")
def list_experiments() -> None:
    """Every experiment, its question and its source."""
    from harness import experiment_file, experiment_tables

    found = [experiment_file.read(experiment_file.find(name)) for name in experiment_file.names()]
    printing.show_tables([experiment_tables.listing(found)])


@experiment.command("show")
def show_experiment(
    what: Annotated[
        str, typer.Argument(help="Name, .toml file, or the folder of a finished one.", show_default=False)
    ],
    device: Annotated[str, option(ENGINE, "Device to plan for: auto, cuda or emulated (auto).")] = "auto",
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What an experiment will do and what its source reported; of a folder, what it found."""
    from harness import experiment as experiments
    from harness import experiment_tables

    if Path(what).is_dir():
        outcome = experiments.show(Path(what))
        printing.show_page(outcome.result, format, experiment_tables.to_csv, experiment_tables.page)
        raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)
    if format is not Format.TABLE:
        raise api.BadSetting("--format is for what a finished experiment found: show its folder")
    planned = experiments.plan(what, experiments.adjusted(device))
    printing.show_tables(experiment_tables.plan(planned.experiment, planned.designs, planned.kind))


@experiment.command("run")
def run_experiment(
    name: Annotated[
        str | None, typer.Argument(help="Name, or .toml file; bench experiment list.", show_default=False)
    ] = None,
    blocks: Annotated[int | None, option(DESIGN, "Blocks, at least 4 (as the experiment says).")] = None,
    rounds: Annotated[
        int | None, option(DESIGN, "Rounds of each workload in a boot (as the experiment says).")
    ] = None,
    seed: Annotated[int | None, option(DESIGN, "Seed of workload order, prompts and arrivals (0).")] = None,
    device: Annotated[str | None, option(ENGINE, "auto, cuda or emulated (auto).")] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, option(OUTPUT, "Folder of an experiment to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Run an experiment, and lay what its source reported beside what is measured here."""
    from harness import experiment as experiments
    from harness import experiment_tables
    from harness.progress import on_stderr

    asked = [name, blocks, rounds, seed, device]
    if resume is not None and any(each is not None for each in asked):
        raise api.BadSetting(f"{resume} records what to run: with --resume, leave name and options out")
    if resume is None and name is None:
        raise api.BadSetting("say which experiment to run: bench experiment list has their names")
    with interruptible():
        if resume is not None:
            outcome = experiments.resume(resume, on_stderr)
        else:
            wanted = experiments.adjusted(device or "auto", blocks, rounds, seed or 0)
            outcome = experiments.run(experiments.plan(name or "", wanted), out, on_stderr)
    printing.show_page(outcome.result, format, experiment_tables.to_csv, experiment_tables.page)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


@app.command("import")
def import_(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Result of vllm bench serve, sglang.bench_serving, guidellm or aiperf; FILE:N, its N-th.",
            show_default=False,
        ),
    ],
    name: Annotated[str | None, option(OUTPUT, "What the run is called (the tool's name).")] = None,
    engine_name: Annotated[str | None, option(ENGINE, "The engine that was measured.")] = None,
    fresh_boots: Annotated[
        bool,
        option(DESIGN, "Each file is from a fresh server: a block each.", "--fresh-boots"),
    ] = False,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Turn another tool's result file into a run, for compare and report; what it lacks is named."""
    from harness.importing import run as importing

    folder, result = importing.bring(files, out, name=name, engine=engine_name, fresh_boots=fresh_boots)
    say(f"written to {folder}")
    printing.show(result, format)


SERVER, MOCK = "Server", "Mock server"


@app.command()
def serve(
    variant: Annotated[
        str | None, typer.Option(help="Serve the after arm of this pair (all); `bench variants`.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Serve this engine with its first choices, in place of a variant.")
    ] = None,
    both: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value: a toggle, an engine option, python, env.NAME."),
    ] = None,
    model: Annotated[str | None, option(SERVER, "Preset, local path or hub id (tiny-gpt2).")] = None,
    device: Annotated[str | None, option(SERVER, "auto, cuda or emulated (auto).")] = None,
    host: Annotated[
        str, option(SERVER, "Address to listen on (127.0.0.1: this machine alone).")
    ] = "127.0.0.1",
    port: Annotated[int, option(SERVER, "0: any that is free; the address is printed (8000).")] = 8000,
    api_key: Annotated[
        str | None,
        option(SERVER, "Key that /v1 asks for, better given by BENCH_API_KEY.", envvar="BENCH_API_KEY"),
    ] = None,
    max_requests: Annotated[
        int | None, option(SERVER, "Requests in flight; more are answered 429 (1024).")
    ] = None,
    grace_s: Annotated[
        float | None, option(SERVER, "Time for requests in flight to end at shutdown (30).")
    ] = None,
    mock: Annotated[
        bool, option(MOCK, "No engine: tokens at known times, to calibrate clients with.", "--mock")
    ] = False,
    ttft_ms: Annotated[float | None, option(MOCK, "From arrival to the first token (50).")] = None,
    itl_ms: Annotated[float | None, option(MOCK, "Between two tokens (10).")] = None,
    max_tokens_per_chunk: Annotated[
        int | None, option(MOCK, "Chunks hold 1, 2, ... this many tokens, in turn (1).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve an engine as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models; and /health,
    /metrics."""
    from harness.serve import asking

    values = dict(locals())
    of_engine = given(
        values, "variant", "engine", "both", "model", "device", "api_key", "max_requests", "grace_s"
    )
    of_mock = given(values, "ttft_ms", "itl_ms", "max_tokens_per_chunk")
    with interruptible():
        if mock:
            asking.serve_mock(of_mock, of_engine, host, port)
        else:
            asking.serve_engine(of_engine, of_mock, host, port)


EVAL = "Evaluation"


@app.command("eval")
@partial(measuring, without=OF_A_MEASUREMENT)
def eval_(
    asked: Asked,
    tasks: Annotated[
        str, option(EVAL, "Tasks of lm-eval, with commas between (offline-arithmetic, which ships here).")
    ] = "offline-arithmetic",
    limit: Annotated[int | None, option(EVAL, "The first so many items of each task.")] = None,
    num_fewshot: Annotated[int | None, option(EVAL, "Examples before each item (the task's).")] = None,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Accuracy before and after: the same items of lm-eval's tasks through both arms, and what differs."""
    from harness.machine import guess_device
    from harness.variants import load_variants

    engines = api.find_engines()
    design = make_design(asked, engines, load_variants(), guess_device)

    from harness.evaluation import evaluate, shown

    names = tuple(tasks.split(","))
    evaluate.check(names, limit, num_fewshot)
    arms = evaluate.scoring(engines, design.arms)
    found = evaluate.evaluate(design.name, arms, names, limit, num_fewshot, out, say)
    say(f"written to {found.folder}")
    printing.show_page(found.result, format, shown.to_csv, shown.page)
    raise typer.Exit(OUTPUTS_DIFFER if found.answers_differ else 0)


def main() -> None:
    """Run the command line and exit."""
    exits.run(typer.main.get_command(app))


if __name__ == "__main__":
    main()
