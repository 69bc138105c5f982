"""The command `bench`. Each command is a thin call into the rest; heavy imports wait until one needs them.

Exit codes: 0 done (undecided included), 1 outputs differ where they must not, 2 bad usage or input, 4 an
engine or the run failed, 130 Ctrl-C. An error is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engines import api

if TYPE_CHECKING:
    from harness.settings import Asked

OUTPUTS_DIFFER, USAGE, FAILED, INTERRUPTED = 1, 2, 4, 130
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
    pretty_exceptions_enable=False,
)
WORKLOAD, ENGINE, DESIGN, OUTPUT = "Workload", "Engine, both arms", "Design", "Output"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


@app.command()
def run(
    variant: Annotated[str | None, typer.Option(help="A named before/after pair; `bench variants`.")] = None,
    engine: Annotated[str | None, typer.Option(help="An engine, in place of a variant.")] = None,
    both: Annotated[list[str] | None, typer.Option("--set", help="key=value for both arms.")] = None,
    before: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the before arm: a toggle, an engine option, python, env.NAME."),
    ] = None,
    after: Annotated[list[str] | None, typer.Option(help="The same for the after arm.")] = None,
    prompt: Annotated[str | None, _option(WORKLOAD, "Text that every request asks.")] = None,
    prompts: Annotated[str | None, _option(WORKLOAD, "File of one prompt per line, or `english`.")] = None,
    input_tokens: Annotated[int | None, _option(WORKLOAD, "Tokens of each prompt, exactly.")] = None,
    max_new_tokens: Annotated[
        int | None, _option(WORKLOAD, "Tokens to generate (64 on emulated, 128 on cuda).")
    ] = None,
    num_requests: Annotated[
        int | None, _option(WORKLOAD, "Requests of a round (32 on emulated, 64 on cuda).")
    ] = None,
    arrival: Annotated[str | None, _option(WORKLOAD, "fixed, burst or closed (fixed).")] = None,
    interval_ms: Annotated[float | None, _option(WORKLOAD, "Between requests, arrival fixed (20).")] = None,
    arrival_schedule: Annotated[str | None, _option(WORKLOAD, "absolute or relative (absolute).")] = None,
    concurrency: Annotated[int | None, _option(WORKLOAD, "Requests in flight, arrival closed.")] = None,
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
    blocks: Annotated[int | None, _option(DESIGN, "Blocks, one boot of each arm each (6).")] = None,
    rounds: Annotated[int | None, _option(DESIGN, "Measured rounds of a boot, pooled (2).")] = None,
    warmup_rounds: Annotated[int | None, _option(DESIGN, "Rounds of a boot thrown away (1).")] = None,
    margin: Annotated[str | None, _option(DESIGN, "Largest change that counts as none (1%).")] = None,
    primary: Annotated[str | None, _option(DESIGN, "Metric that decides (tpot_ms_p50).")] = None,
    secondary: Annotated[
        list[str] | None, _option(DESIGN, "Further metric with a verdict; up to five.")
    ] = None,
    seed: Annotated[int | None, _option(DESIGN, "Of order, prompts and arrivals (0).")] = None,
    out: Annotated[Path, _option(OUTPUT, "Folder that gets the run's own (results).")] = Path("results"),
    resume: Annotated[Path | None, _option(OUTPUT, "Folder of a run to go on with.")] = None,
    format: Annotated[Format, _option(OUTPUT, "table, markdown, json or csv (table).")] = Format.TABLE,
    debug: Annotated[bool, _option(OUTPUT, "Print a traceback with an error.")] = False,
) -> None:
    """Compare a before with an after, in blocks of fresh boots; or measure one arm alone."""
    given = dict(locals())
    from harness.settings import Asked, parse_fraction

    asked = Asked(
        variant=variant,
        engine=engine,
        both=tuple(both or ()),
        before=tuple(before or ()),
        after=tuple(after or ()),
        workload={
            **_given(
                given, "prompt", "prompts", "input_tokens", "max_new_tokens", "num_requests", "arrival",
                "interval_ms", "arrival_schedule", "concurrency", "pretok", "stop_on_eos",
                "temperature", "top_k", "top_p",
            ),
            **({} if not stop else {"stop": stop}),
        },
        options=_given(
            given, "model", "device", "dtype", "staging", "max_batch_size", "prefill_max_batch_size",
            "prefill_max_tokens", "prefix_cache", "stream_interval",
        ),
        design={
            **_given(given, "blocks", "rounds", "warmup_rounds", "primary", "seed"),
            **({} if margin is None else {"margin": parse_fraction(margin, "--margin")}),
            **({} if not secondary else {"secondaries": tuple(secondary)}),
        },
    )  # fmt: skip
    try:
        _measure(asked, out, resume, format)
    except KeyboardInterrupt as error:  # typer would swallow it, and what it carries
        raise Interrupted("; ".join(["interrupted", *_notes(error)])) from error


def _given(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if values[name] is not None}


def _measure(asked: Asked, out: Path, resume: Path | None, form: Format) -> None:
    from harness.machine import guess_device
    from harness.settings import make_design
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


def _show(result: Mapping[str, Any], form: Format) -> None:
    """Print a result on stdout."""
    from harness import tables

    match form:
        case Format.JSON:
            import msgspec

            sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
        case Format.CSV:
            sys.stdout.write(tables.to_csv(result))
        case Format.MARKDOWN:
            sys.stdout.write(tables.to_markdown(result))
        case Format.TABLE:
            from rich.console import Console

            console = Console(highlight=False)
            if not console.is_terminal:
                console = Console(highlight=False, width=PIPE_WIDTH)
            console.print(*tables.to_terminal(result, console.width), sep="\n")


@app.command()
def variants(
    name: Annotated[str | None, typer.Argument(help="One variant, in full.", show_default=False)] = None,
) -> None:
    """The named before/after pairs: what each changes, its source, and what to expect where."""
    from rich.console import Console

    from harness import listings
    from harness.variants import load_variants

    found = load_variants()
    if name is None:
        Console(highlight=False).print(listings.variants(found))
    else:
        Console(highlight=False).print(listings.variant(api.pick(name, found, "variant"), api.find_engines()))


@app.command()
def engines() -> None:
    """Every installed engine and its toggles."""
    from rich.console import Console

    from harness import listings

    Console(highlight=False).print(*listings.engines(api.find_engines()), sep="\n")


@app.command()
def doctor() -> None:
    """What would be measured here, and what would spoil it."""
    from rich.console import Console

    from harness import doctor as checks
    from harness import listings

    Console(highlight=False).print(listings.checkup(checks.examine()))


def main() -> None:
    """Run the command line; the only place where an error becomes a line and an exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="bench", standalone_mode=False)
    except Interrupted as error:
        code = _complain(str(error), error, INTERRUPTED)
    except CLICK_ERROR as error:  # what typer itself found wrong with the words
        code = _complain(error.format_message(), error, USAGE)
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
