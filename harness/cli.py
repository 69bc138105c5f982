"""The command `bench`. Each command is a thin call into the rest; heavy imports wait until one needs them.

Exit codes: 0 done (undecided included), 1 outputs differ where they must not, or a gate fails, 2 bad usage or
input, 3 a gate is undecided, 4 an engine or the run failed, 130 Ctrl-C. An error is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines import api
from harness.settings import Asked, make_design, parse_fraction, parse_goodput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.pages import Page, Table

OUTPUTS_DIFFER, USAGE, FAILED, INTERRUPTED = 1, 2, 4, 130
GATE_FAILED, GATE_UNDECIDED = 1, 3
PIPE_WIDTH = 120  # columns of a table that goes to no terminal
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException of whichever click this typer brings


class Interrupted(Exception):
    """Ctrl-C; the message says what is kept."""


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


app = typer.Typer(
    help="Does this overlap optimization really help, by how much, and how sure are we?",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a docstring
    pretty_exceptions_enable=False,
)
WORKLOAD, ENGINE, DESIGN, OUTPUT = "Workload", "Engine, both arms", "Design", "Output"
LENGTH, LENGTH_FORMS = "LENGTH", "a number, uniform:LOW:HIGH or normal:MEAN:SD"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def request(
    variant: Annotated[str | None, typer.Option(help="A named before/after pair; `bench variants`.")] = None,
    engine: Annotated[str | None, typer.Option(help="An engine, in place of a variant.")] = None,
    both: Annotated[list[str] | None, typer.Option("--set", help="key=value for both arms.")] = None,
    before: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the before arm: a toggle, an engine option, python, env.NAME."),
    ] = None,
    after: Annotated[list[str] | None, typer.Option(help="The same for the after arm.")] = None,
    prompt: Annotated[str | None, _option(WORKLOAD, "Text that every request asks.")] = None,
    prompts: Annotated[
        str | None,
        _option(WORKLOAD, "File of one prompt per line, ShareGPT file (.json), or `english`."),
    ] = None,
    prompt_repeats: Annotated[
        int | None, _option(WORKLOAD, "How often each prompt is asked: a prefix to reuse.")
    ] = None,
    unique_prompts: Annotated[
        bool | None, _option(WORKLOAD, "No two prompts begin alike (off).", "--unique-prompts")
    ] = None,
    input_tokens: Annotated[
        str | None,
        _option(WORKLOAD, f"Tokens of each prompt: {LENGTH_FORMS}.", metavar=LENGTH),
    ] = None,
    max_new_tokens: Annotated[
        str | None,
        _option(
            WORKLOAD,
            f"Tokens to generate: {LENGTH_FORMS} (64 on emulated, 128 on cuda; as in the data for a trace "
            "and for ShareGPT).",
            metavar=LENGTH,
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        _option(WORKLOAD, "Requests of a round (16 on emulated, 64 on cuda); a trace's first."),
    ] = None,
    arrival: Annotated[
        str | None, _option(WORKLOAD, "fixed, poisson, gamma, burst, closed or trace (fixed).")
    ] = None,
    interval_ms: Annotated[
        float | None, _option(WORKLOAD, "Between requests (5 on emulated, 20 on cuda).")
    ] = None,
    arrival_schedule: Annotated[str | None, _option(WORKLOAD, "absolute or relative (absolute).")] = None,
    rate: Annotated[
        float | None,
        _option(WORKLOAD, "Requests per second, arrival poisson and gamma; a trace is stretched to it."),
    ] = None,
    burstiness: Annotated[
        float | None,
        _option(WORKLOAD, "Shape of the gamma distribution: 1 is Poisson, less comes in bursts (1)."),
    ] = None,
    ramp_up: Annotated[
        str | None,
        _option(
            WORKLOAD,
            "Rate to start from; it grows by request to --rate, at the last or the REQUESTS-th.",
            metavar="START[:REQUESTS]",
        ),
    ] = None,
    concurrency: Annotated[int | None, _option(WORKLOAD, "Requests in flight, arrival closed.")] = None,
    trace: Annotated[
        str | None, _option(WORKLOAD, "File to replay, arrival trace: Mooncake (.jsonl) or BurstGPT (.csv).")
    ] = None,
    trace_scale: Annotated[
        float | None, _option(WORKLOAD, "Factor on every length of the trace, to fit the context (1).")
    ] = None,
    pretok: Annotated[
        bool | None, _option(WORKLOAD, "Send token ids instead of text (on).", "--pretok/--no-pretok")
    ] = None,
    stop_on_eos: Annotated[
        bool | None, _option(WORKLOAD, "End at EOS (off).", "--stop-on-eos/--no-stop-on-eos")
    ] = None,
    stop: Annotated[
        list[str] | None, _option(WORKLOAD, "End a request where its text comes to this; more than once.")
    ] = None,
    temperature: Annotated[float | None, _option(WORKLOAD, "Sample at this temperature (0, greedy).")] = None,
    top_k: Annotated[int | None, _option(WORKLOAD, "Sample from the most likely so many (0, all).")] = None,
    top_p: Annotated[
        float | None, _option(WORKLOAD, "Sample from the most likely that hold this share (1, all).")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        _option(WORKLOAD, "What a good request stays within: ttft:200, tpot:50, latency:2000 (ms)."),
    ] = None,
    model: Annotated[str | None, _option(ENGINE, "Preset, local path or hub id (tiny-gpt2).")] = None,
    device: Annotated[str | None, _option(ENGINE, "auto, cuda or emulated (auto).")] = None,
    dtype: Annotated[str | None, _option(ENGINE, "float32, bfloat16 or float16 (float32).")] = None,
    staging: Annotated[
        str | None, _option(ENGINE, "Pageable copies of the emulated device: copy or sync (copy).")
    ] = None,
    max_batch_size: Annotated[int | None, _option(ENGINE, "Requests decoded together (64).")] = None,
    prefill_max_batch_size: Annotated[
        int | None, _option(ENGINE, "Requests prefilled together (64).")
    ] = None,
    prefill_max_tokens: Annotated[int | None, _option(ENGINE, "Padded tokens of one prefill (2048).")] = None,
    prefix_cache: Annotated[
        bool | None,
        _option(ENGINE, "Keep and share KV of equal beginnings (off).", "--prefix-cache/--no-prefix-cache"),
    ] = None,
    stream_interval: Annotated[int | None, _option(ENGINE, "Tokens per chunk after the first (8).")] = None,
    tokenize_workers: Annotated[
        int | None, _option(ENGINE, "Threads that tokenize, with --no-pretok; 0: the scheduler's own (0).")
    ] = None,
    blocks: Annotated[int | None, _option(DESIGN, "Blocks, one boot of each arm each (6).")] = None,
    until_decided: Annotated[
        bool, _option(DESIGN, "Stop once the verdict is clear: looks at 6, 8, ... blocks.", "--until-decided")
    ] = False,
    until_precision: Annotated[
        str | None, _option(DESIGN, "Stop once the interval's half-width is this small, such as 1%.")
    ] = None,
    max_blocks: Annotated[int | None, _option(DESIGN, "Blocks at most, where it may stop (20).")] = None,
    plant: Annotated[
        str | None, _option(DESIGN, "Delay each step of the after arm by a known share, such as 3%.")
    ] = None,
    plant_at: Annotated[str | None, _option(DESIGN, "device or host (device).")] = None,
    rounds: Annotated[
        int | None, _option(DESIGN, "Measured rounds of a boot (10 on emulated, 2 on cuda).")
    ] = None,
    warmup_rounds: Annotated[int | None, _option(DESIGN, "Rounds of a boot thrown away (1).")] = None,
    margin: Annotated[str | None, _option(DESIGN, "Largest change that counts as none (1%).")] = None,
    primary: Annotated[str | None, _option(DESIGN, "Metric that decides (tpot_ms_p50).")] = None,
    secondary: Annotated[
        list[str] | None, _option(DESIGN, "Further metric with a verdict; up to five.")
    ] = None,
    seed: Annotated[int | None, _option(DESIGN, "Of order, prompts and arrivals (0).")] = None,
) -> Asked:
    """What every command that measures can be asked for."""
    given = dict(locals())
    return Asked(
        variant=variant,
        engine=engine,
        both=tuple(both or ()),
        before=tuple(before or ()),
        after=tuple(after or ()),
        workload={
            **_given(
                given, "prompt", "prompts", "prompt_repeats", "unique_prompts", "input_tokens",
                "max_new_tokens", "num_requests", "arrival", "interval_ms", "arrival_schedule", "rate",
                "burstiness", "ramp_up", "concurrency", "trace", "trace_scale", "pretok", "stop_on_eos",
                "temperature", "top_k", "top_p",
            ),
            **({} if not stop else {"stop": stop}),
        },
        options=_given(
            given, "model", "device", "dtype", "staging", "max_batch_size", "prefill_max_batch_size",
            "prefill_max_tokens", "prefix_cache", "stream_interval", "tokenize_workers",
        ),
        design={
            **_given(given, "blocks", "rounds", "warmup_rounds", "primary", "seed"),
            **({} if margin is None else {"margin": parse_fraction(margin, "--margin")}),
            **({} if not goodput else {"goodput": parse_goodput(goodput)}),
            **({} if not secondary else {"secondaries": tuple(secondary)}),
        },
        until_decided=until_decided,
        until_precision=_fraction(until_precision, "--until-precision"),
        max_blocks=max_blocks,
        plant=_fraction(plant, "--plant"),
        plant_at=plant_at,
    )  # fmt: skip


def _fraction(text: str | None, flag: str) -> float | None:
    return None if text is None else parse_fraction(text, flag)


def _given(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if values[name] is not None}


def measuring(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """`command(asked, ...)` with the options of `request` in place of `asked`, in front of its own; `without`
    those that mean nothing to it."""
    shared, own = signature(request, eval_str=True), signature(command, eval_str=True)
    options = [option for name, option in shared.parameters.items() if name not in without]

    @wraps(command)
    def with_options(**given: Any) -> None:
        asked = request(**{option.name: given.pop(option.name) for option in options})
        with _interruptible():
            command(asked, **given)

    joined = [*options, *list(own.parameters.values())[1:]]
    with_options.__signature__ = Signature(joined)  # type: ignore[attr-defined]
    with_options.__annotations__ = {option.name: option.annotation for option in joined}
    return with_options


@contextmanager
def _interruptible() -> Iterator[None]:
    """Typer would swallow a Ctrl-C, and what it carries."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("; ".join(["interrupted", *_notes(error)])) from error


Out = Annotated[Path, _option(OUTPUT, "Folder that gets the run's own (results).")]
Form = Annotated[Format, _option(OUTPUT, "table, markdown, json or csv (table).")]
Debug = Annotated[bool, _option(OUTPUT, "Print a traceback with an error.")]
RESULTS = Path("results")


@app.command()
@measuring
def run(
    asked: Asked,
    out: Out = RESULTS,
    resume: Annotated[Path | None, _option(OUTPUT, "Folder of a run to go on with.")] = None,
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


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="RUN, or RUN:before or RUN:after.", show_default=False)],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Compare stored runs, or the arms of one; what was not interleaved gets no verdict."""
    from harness import across_runs

    compared = across_runs.compare(runs)
    _show(compared.result, format)
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
        sys.stderr.write(f"bench: than {manifest.run}, {line}\n")
    with _interruptible():
        outcome = measure.measure(manifest.design, out, on_stderr)
    _show(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


class GraphTrace(StrEnum):
    GRAPH = "graph"
    NODE = "node"


PROFILE = "Profile"
# What decides a comparison: a profile decides nothing.
OF_A_VERDICT = (
    "blocks", "until_decided", "until_precision", "max_blocks", "plant", "plant_at", "rounds", "margin",
    "primary", "secondary", "goodput",
)  # fmt: skip


@app.command()
@partial(measuring, without=OF_A_VERDICT)
def profile(
    asked: Asked,
    steps: Annotated[int | None, _option(PROFILE, "Steps of the window (24).")] = None,
    nsys: Annotated[
        str | None, _option(PROFILE, "Nsight Systems, where it is not on PATH or there is no GPU.")
    ] = None,
    graph_trace: Annotated[
        GraphTrace | None,
        _option(PROFILE, "nsys: a row per CUDA graph, or per node of it, which slows it down (graph)."),
    ] = None,
    print_command: Annotated[
        bool, _option(PROFILE, "Print the nsys command of each arm and end.", "--print-command")
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
        raise api.BadSetting("--graph-trace means something only with nsys; give --nsys PATH")
    tool = None if found is None else profiling.Nsys(found, graph)
    profiled = profiling.profile(design, wanted, tool, out, _say)
    _show_traces(profiled.traces, format)
    _say(f"the traces open in ui.perfetto.dev; the picture is {profiled.picture}")


def _say(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")


def _show_traces(files: Sequence[Path], format: Format) -> None:
    """What is in the trace of one arm, or of a before and an after."""
    from harness.trace import analysis, report, trace_file
    from harness.trace.progress import on_stderr

    analysed: list[report.Analysed] = []
    with _interruptible(), on_stderr() as progress:
        for file in files:
            found = trace_file.read(file, progress)
            analysed.append((found, analysis.analyse(found, progress)))
    result = report.result(analysed[0], analysed[1] if len(files) == 2 else None)
    _print_page(result, format, report.to_csv, report.page)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Where each decode step's interval goes, what made late requests late, and what was to be expected."""
    from harness import explain as records
    from harness import explain_tables

    found = records.explain(run)
    _print_page(found, format, explain_tables.to_csv, explain_tables.page)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", show_default=False)],
    out: Annotated[
        Path, _option(OUTPUT, "File to write: .html, or .md for a pull request (report.html).", "-o", "--out")
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
        str | None, _option(GATE, "Git ref whose code the base runs, in a worktree of its own.")
    ] = None,
    head_ref: Annotated[
        str | None, _option(GATE, "The same for the head (the code that is installed).")
    ] = None,
    metric: Annotated[
        list[str] | None, _option(GATE, "Metric that must not regress; up to five (tpot_ms_p50).")
    ] = None,
    max_regression: Annotated[str | None, _option(GATE, "How much worse each may get (2%).")] = None,
    on_undecided: Annotated[
        OnUndecided | None, _option(GATE, "What undecided counts as; else it exits with 3.")
    ] = None,
    out: Annotated[
        Path, _option(OUTPUT, "Folder of the run, of gate.md and of smaller-is-better.json (results).")
    ] = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Fail where a change makes a metric worse by more than it may: for continuous integration."""
    limit = _fraction(max_regression, "--max-regression")
    if run is None:
        run = _measure_gate(asked, base_ref, head_ref, tuple(metric or ()), limit, out)
    elif not asked.nothing or base_ref or head_ref:
        raise api.BadSetting(f"{run} is measured: with it, only --metric and --max-regression mean something")

    from harness import gate_run

    gated = gate_run.judge(run, metric or (), limit)
    gate_run.write(out, gated)
    _show(gated.result, format, gated.verdict)
    raise typer.Exit(_gate_code(gated.verdict, on_undecided))


def _gate_code(verdict: str, on_undecided: OnUndecided | None) -> int:
    said = on_undecided.value if verdict == "undecided" and on_undecided is not None else verdict
    return {"pass": 0, "fail": GATE_FAILED, "undecided": GATE_UNDECIDED}[said]


def _measure_gate(
    asked: Asked, base: str | None, head: str | None, metric: tuple[str, ...], limit: float | None, out: Path
) -> Path:
    """Measure base against head; the folder of the run."""
    from harness.gate import DEFAULT_LIMIT
    from harness.machine import guess_device
    from harness.variants import load_variants
    from harness.worktrees import resolve, uncommitted

    if {"primary", "secondaries"} & set(asked.design):
        raise api.BadSetting("a gate is about its --metric; leave --primary and --secondary out")
    if asked.until_precision is not None:
        raise api.BadSetting("a gate stops after --blocks, or --until-decided")
    if head is not None and base is None:
        raise api.BadSetting("--head-ref needs a --base-ref to be compared with")
    refs = None
    if base is not None:
        refs = (resolve(base, Path.cwd()), None if head is None else resolve(head, Path.cwd()))
    names: dict[str, Any] = {"primary": metric[0], "secondaries": metric[1:]} if metric else {}
    asked = replace(
        asked,
        design={**asked.design, **names},
        refs=refs,
        max_regression=DEFAULT_LIMIT if limit is None else limit,
    )
    design = make_design(asked, api.find_engines(), load_variants(), guess_device)
    if len(design.arms) < 2:
        raise api.BadSetting("a gate needs two arms: --variant, --after key=value, or --base-ref")
    for ref in filter(None, refs or ()):
        if changed := uncommitted(ref):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            _say(f"{ref.name} is measured as it was committed, without your changes to {changed[0]}{more}")

    from harness import measure
    from harness.progress import on_stderr

    return measure.measure(design, out, on_stderr).folder


def _measure(asked: Asked, out: Path, resume: Path | None, form: Format) -> None:
    from harness.machine import guess_device
    from harness.variants import load_variants

    design = None
    if resume is None or not asked.nothing:
        design = make_design(asked, api.find_engines(), load_variants(), guess_device)

    from harness import measure
    from harness.progress import on_stderr

    if resume is not None:
        outcome = measure.resume(resume, design, on_stderr)
    else:
        assert design is not None
        outcome = measure.measure(design, out, on_stderr)
    _show(outcome.result, form)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


def _show(result: Mapping[str, Any], form: Format, gate: str | None = None) -> None:
    """Print a result on stdout; `gate`: what a gate said of it."""
    from harness import factorial_tables, gate_tables, tables

    if "factorial" in result:
        _print_page(result, form, factorial_tables.to_csv, factorial_tables.page)
    elif gate is None:
        _print(result, form, tables.to_csv, tables.to_markdown, tables.to_terminal)
    else:
        _print(
            result,
            form,
            tables.to_csv,
            lambda result: gate_tables.to_markdown(result, gate),
            lambda result, width: gate_tables.to_terminal(result, gate, width),
        )


def _print_page(
    result: Mapping[str, Any],
    form: Format,
    to_csv: Callable[[Mapping[str, Any]], str],
    page: Callable[[Mapping[str, Any]], Page],
) -> None:
    """Print an object that is one page."""
    from harness.pages import markdown_page, terminal_page

    _print(
        result,
        form,
        to_csv,
        lambda result: markdown_page(page(result)),
        lambda result, width: terminal_page(page(result), width),
    )


def _print(
    result: Mapping[str, Any],
    form: Format,
    to_csv: Callable[[Mapping[str, Any]], str],
    to_markdown: Callable[[Mapping[str, Any]], str],
    to_terminal: Callable[[Mapping[str, Any], int], Iterator[RenderableType]],
) -> None:
    """Print an object on stdout in one of its forms."""
    match form:
        case Format.JSON:
            import msgspec

            sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
        case Format.CSV:
            sys.stdout.write(to_csv(result))
        case Format.MARKDOWN:
            sys.stdout.write(to_markdown(result))
        case Format.TABLE:
            from rich.console import Console

            console = Console(highlight=False)
            if not console.is_terminal:
                console = Console(highlight=False, width=PIPE_WIDTH)
            console.print(*to_terminal(result, console.width), sep="\n")


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


@app.command()
def variants(
    name: Annotated[str | None, typer.Argument(help="One variant, in full.", show_default=False)] = None,
) -> None:
    """The named before/after pairs: what each changes, its source, and what to expect where."""
    from rich.console import Console

    from harness import listings
    from harness.variants import load_variants

    found, console = load_variants(), Console(highlight=False)
    if name is None:
        console.print(listings.variants(found, console.width))
    else:
        chosen = api.pick(name, found, "variant")
        console.print(listings.variant(chosen, api.find_engines(), console.width))


@app.command()
def engines() -> None:
    """Every installed engine and its toggles."""
    from rich.console import Console

    from harness import listings

    console = Console(highlight=False)
    console.print(*listings.engines(api.find_engines(), console.width), sep="\n")


@app.command()
def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from rich.console import Console

    from harness import doctor as checks
    from harness import listings

    console = Console(highlight=False)
    console.print(listings.checkup(checks.examine(), console.width))


# Two arms have a before and an after; here the toggles say what differs, and the blocks are fixed.
OF_TWO_ARMS = (
    "variant", "before", "after", "until_decided", "until_precision", "max_blocks", "plant", "plant_at",
    "secondary",
)  # fmt: skip


@app.command()
@partial(measuring, without=OF_TWO_ARMS)
def factorial(
    asked: Asked,
    run: Annotated[
        Path | None, typer.Argument(help="A finished factorial to show again.", show_default=False)
    ] = None,
    toggles: Annotated[
        str | None,
        _option(DESIGN, "Toggles to vary: NAME, or NAME=BEFORE:AFTER, joined by commas.", metavar="A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, _option(OUTPUT, "Folder of a factorial to go on with.")] = None,
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
        raise api.BadSetting(f"{run} is measured: with it, only --format means something")
    _show(result, format)
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
        _option(DESIGN, "Setting and its values; once for each axis of the grid.", metavar="NAME=A,B,..."),
    ] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, _option(OUTPUT, "Folder of a sweep to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Measure a grid of runs one after the other: a workload option, a variant, a toggle, at each value."""
    from harness import sweep_run, sweep_tables

    if folder is None:
        folder = sweep_run.measure(asked, over or (), resume, out, _say)
    elif not asked.nothing or over or resume is not None:
        raise api.BadSetting(f"{folder} is measured: with it, only --format means something")
    result, outputs_differ = sweep_run.result(folder)
    _print_page(result, format, sweep_tables.to_csv, sweep_tables.page)
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
    _print_tables([experiment_tables.listing(found)])


@experiment.command("show")
def show_experiment(
    what: Annotated[
        str, typer.Argument(help="Name, .toml file, or the folder of a finished one.", show_default=False)
    ],
    device: Annotated[str, _option(ENGINE, "What it would do on auto, cuda or emulated (auto).")] = "auto",
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """What an experiment will do and what its source reported; of a folder, what it found."""
    from harness import experiment as experiments
    from harness import experiment_tables

    if Path(what).is_dir():
        outcome = experiments.show(Path(what))
        _print_experiment(outcome.result, format)
        raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)
    if format is not Format.TABLE:
        raise api.BadSetting("--format is of what a finished experiment found: show its folder")
    planned = experiments.plan(what, experiments.adjusted(device))
    _print_tables(experiment_tables.plan(planned.experiment, planned.designs, planned.kind))


@experiment.command("run")
def run_experiment(
    name: Annotated[
        str | None, typer.Argument(help="Name, or .toml file; bench experiment list.", show_default=False)
    ] = None,
    blocks: Annotated[int | None, _option(DESIGN, "Blocks, at least 4 (as the experiment says).")] = None,
    rounds: Annotated[
        int | None, _option(DESIGN, "Rounds of each workload in a boot (as the experiment says).")
    ] = None,
    seed: Annotated[int | None, _option(DESIGN, "Of order, prompts and arrivals (0).")] = None,
    device: Annotated[str | None, _option(ENGINE, "auto, cuda or emulated (auto).")] = None,
    out: Out = RESULTS,
    resume: Annotated[Path | None, _option(OUTPUT, "Folder of an experiment to go on with.")] = None,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Run an experiment, and lay what its source reported beside what is measured here."""
    from harness import experiment as experiments
    from harness.progress import on_stderr

    asked = [name, blocks, rounds, seed, device]
    if resume is not None and any(each is not None for each in asked):
        raise api.BadSetting(f"{resume} says what it is: with --resume, leave name and options out")
    if resume is None and name is None:
        raise api.BadSetting("say which experiment to run: bench experiment list has their names")
    with _interruptible():
        if resume is not None:
            outcome = experiments.resume(resume, on_stderr)
        else:
            wanted = experiments.adjusted(device or "auto", blocks, rounds, seed or 0)
            outcome = experiments.run(experiments.plan(name or "", wanted), out, on_stderr)
    _print_experiment(outcome.result, format)
    raise typer.Exit(OUTPUTS_DIFFER if outcome.outputs_differ else 0)


def _print_experiment(result: Mapping[str, Any], format: Format) -> None:
    from harness import experiment_tables

    _print(
        result, format, experiment_tables.to_csv, experiment_tables.to_markdown, experiment_tables.to_terminal
    )


def _print_tables(tables: Sequence[Table]) -> None:
    from rich.console import Console

    from harness.pages import terminal_table

    console = Console(highlight=False)
    for table in tables:
        console.print(*terminal_table(table, console.width), sep="\n")


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
    name: Annotated[str | None, _option(OUTPUT, "What the run is called (the tool's name).")] = None,
    engine_name: Annotated[str | None, _option(ENGINE, "The engine that was measured.")] = None,
    fresh_boots: Annotated[
        bool,
        _option(DESIGN, "Each file is of a server started anew: a block each.", "--fresh-boots"),
    ] = False,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Make a run of another tool's result file, for compare and report; what it lacks is named."""
    from harness.importing import run as importing

    folder, result = importing.bring(files, out, name=name, engine=engine_name, fresh_boots=fresh_boots)
    _say(f"written to {folder}")
    _show(result, format)


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
    model: Annotated[str | None, _option(SERVER, "Preset, local path or hub id (tiny-gpt2).")] = None,
    device: Annotated[str | None, _option(SERVER, "auto, cuda or emulated (auto).")] = None,
    host: Annotated[
        str, _option(SERVER, "Address to listen on (127.0.0.1: this machine alone).")
    ] = "127.0.0.1",
    port: Annotated[int, _option(SERVER, "0: any that is free; the address is printed (8000).")] = 8000,
    api_key: Annotated[
        str | None,
        _option(SERVER, "What /v1 asks of clients, better given by BENCH_API_KEY.", envvar="BENCH_API_KEY"),
    ] = None,
    max_requests: Annotated[
        int | None, _option(SERVER, "Requests in flight; more are answered 429 (1024).")
    ] = None,
    grace_s: Annotated[
        float | None, _option(SERVER, "For requests in flight to end, once told to stop (30).")
    ] = None,
    mock: Annotated[
        bool, _option(MOCK, "No engine: tokens at known times, to calibrate clients with.", "--mock")
    ] = False,
    ttft_ms: Annotated[float | None, _option(MOCK, "From arrival to the first token (50).")] = None,
    itl_ms: Annotated[float | None, _option(MOCK, "Between two tokens (10).")] = None,
    max_tokens_per_chunk: Annotated[
        int | None, _option(MOCK, "Chunks hold 1, 2, ... so many tokens in turn (1).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve an engine as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models; and /health,
    /metrics."""
    from harness.serve import asking

    given = dict(locals())
    of_engine = _given(
        given, "variant", "engine", "both", "model", "device", "api_key", "max_requests", "grace_s"
    )
    of_mock = _given(given, "ttft_ms", "itl_ms", "max_tokens_per_chunk")
    with _interruptible():
        if mock:
            asking.serve_mock(of_mock, of_engine, host, port)
        else:
            asking.serve_engine(of_engine, of_mock, host, port)


# What a measurement is made of: an evaluation asks tasks, and times nothing.
OF_A_MEASUREMENT = (
    *OF_A_VERDICT, "warmup_rounds", "seed", "prompt", "prompts", "prompt_repeats", "unique_prompts",
    "input_tokens", "max_new_tokens", "num_requests", "arrival", "interval_ms", "arrival_schedule", "rate",
    "burstiness", "ramp_up", "concurrency", "trace", "trace_scale", "pretok", "stop_on_eos", "stop",
    "temperature", "top_k", "top_p", "tokenize_workers",
)  # fmt: skip
EVAL = "Evaluation"


@app.command("eval")
@partial(measuring, without=OF_A_MEASUREMENT)
def eval_(
    asked: Asked,
    tasks: Annotated[
        str, _option(EVAL, "Tasks of lm-eval, with commas between (offline-arithmetic, which ships here).")
    ] = "offline-arithmetic",
    limit: Annotated[int | None, _option(EVAL, "The first so many items of each task.")] = None,
    num_fewshot: Annotated[int | None, _option(EVAL, "Examples before each item (the task's).")] = None,
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
    found = evaluate.evaluate(design.name, arms, names, limit, num_fewshot, out, _say)
    _say(f"written to {found.folder}")
    _print_page(found.result, format, shown.to_csv, shown.page)
    raise typer.Exit(OUTPUTS_DIFFER if found.answers_differ else 0)


def main() -> None:
    """Run the command line; the only place where an error becomes a line and an exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="bench", standalone_mode=False)
    except Interrupted as error:
        code = _complain(str(error), error, INTERRUPTED)
    except CLICK_ERROR as error:  # what typer itself found wrong with the words; nothing where it gave help
        said = error.format_message()
        code = _complain(said, error, USAGE) if said else USAGE
    except api.BadSetting as error:
        code = _complain("; ".join([str(error), *_notes(error)]), error, USAGE)
    except api.EngineError as error:
        code = _complain("; ".join([str(error), *_notes(error)]), error, FAILED)
    except Exception as error:
        what = f"unexpected {type(error).__name__}: {error}"
        code = _complain("; ".join([what, *_notes(error), "--debug shows where"]), error, FAILED)
    sys.exit(code or 0)


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def _complain(message: str, error: BaseException, code: int) -> int:
    """The one line; with --debug what is known besides: the traceback, and a dead process's own words."""
    if "--debug" in sys.argv:
        import traceback

        traceback.print_exception(error)
        sys.stderr.write(getattr(error, "details", ""))
    line = " ".join(message.split())
    sys.stderr.write(f"bench: {line}\n")
    return code


if __name__ == "__main__":
    main()
