"""The options that commands share: what a measurement can be told, and where and how its result is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.interruption import interruptible
from harness.printing import Format
from harness.settings import Asked, parse_fraction, parse_goodput
from harness.workload import lengths

WORKLOAD, ENGINE, DESIGN, OUTPUT = "Workload", "Engine, both arms", "Design", "Output"
LENGTH = "LENGTH"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option under the title `panel` of the help; `text` itself states the default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


Out = Annotated[Path, option(OUTPUT, "Folder that gets the run's folder (results).")]
Form = Annotated[Format, option(OUTPUT, "table, markdown, json or csv (table).")]
Debug = Annotated[bool, option(OUTPUT, "Print a traceback with an error.")]
RESULTS = Path("results")


def request(
    variant: Annotated[str | None, typer.Option(help="A named before/after pair; `bench variants`.")] = None,
    engine: Annotated[str | None, typer.Option(help="An engine, in place of a variant.")] = None,
    both: Annotated[list[str] | None, typer.Option("--set", help="key=value for both arms.")] = None,
    before: Annotated[
        list[str] | None,
        typer.Option(help="key=value for the before arm: a toggle, an engine option, python, env.NAME."),
    ] = None,
    after: Annotated[list[str] | None, typer.Option(help="The same for the after arm.")] = None,
    prompt: Annotated[str | None, option(WORKLOAD, "Text that every request asks.")] = None,
    prompts: Annotated[
        str | None,
        option(WORKLOAD, "File of one prompt per line, ShareGPT file (.json), or `english`."),
    ] = None,
    prompt_repeats: Annotated[
        int | None, option(WORKLOAD, "How often each prompt is asked: a prefix to reuse.")
    ] = None,
    unique_prompts: Annotated[
        bool | None, option(WORKLOAD, "No two prompts begin alike (off).", "--unique-prompts")
    ] = None,
    input_tokens: Annotated[
        str | None,
        option(WORKLOAD, f"Tokens of each prompt: {lengths.FORMS}.", metavar=LENGTH),
    ] = None,
    max_new_tokens: Annotated[
        str | None,
        option(
            WORKLOAD,
            f"Tokens to generate: {lengths.FORMS} (64 on emulated, 128 on cuda; as in the data for a trace "
            "and for ShareGPT).",
            metavar=LENGTH,
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        option(WORKLOAD, "Requests of a round (16 on emulated, 64 on cuda); a trace's first."),
    ] = None,
    arrival: Annotated[
        str | None, option(WORKLOAD, "fixed, poisson, gamma, burst, closed or trace (fixed).")
    ] = None,
    interval_ms: Annotated[
        float | None, option(WORKLOAD, "Between requests (5 on emulated, 20 on cuda).")
    ] = None,
    arrival_schedule: Annotated[str | None, option(WORKLOAD, "absolute or relative (absolute).")] = None,
    rate: Annotated[
        float | None,
        option(WORKLOAD, "Requests per second, arrival poisson and gamma; a trace is stretched to it."),
    ] = None,
    burstiness: Annotated[
        float | None,
        option(WORKLOAD, "Shape of the gamma distribution: 1 is Poisson, less comes in bursts (1)."),
    ] = None,
    ramp_up: Annotated[
        str | None,
        option(
            WORKLOAD,
            "RATE to start from; it grows with each request to --rate at the last or N-th.",
            metavar="RATE[:N]",
        ),
    ] = None,
    concurrency: Annotated[int | None, option(WORKLOAD, "Requests in flight, arrival closed.")] = None,
    trace: Annotated[
        str | None, option(WORKLOAD, "File to replay, arrival trace: Mooncake (.jsonl) or BurstGPT (.csv).")
    ] = None,
    trace_scale: Annotated[
        float | None, option(WORKLOAD, "Factor on every length of the trace, to fit the context (1).")
    ] = None,
    pretok: Annotated[
        bool | None, option(WORKLOAD, "Send token ids instead of text (on).", "--pretok/--no-pretok")
    ] = None,
    stop_on_eos: Annotated[
        bool | None, option(WORKLOAD, "End at EOS (off).", "--stop-on-eos/--no-stop-on-eos")
    ] = None,
    stop: Annotated[
        list[str] | None, option(WORKLOAD, "End a request where its text reaches this; repeatable.")
    ] = None,
    temperature: Annotated[float | None, option(WORKLOAD, "Sample at this temperature (0, greedy).")] = None,
    top_k: Annotated[
        int | None, option(WORKLOAD, "Sample from this many of the likeliest tokens (0, all).")
    ] = None,
    top_p: Annotated[
        float | None,
        option(WORKLOAD, "Sample from the likeliest tokens with this total probability (1, all)."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        option(WORKLOAD, "Limits of a good request: ttft:200, tpot:50, latency:2000 (ms)."),
    ] = None,
    model: Annotated[str | None, option(ENGINE, "Preset, local path or hub id (tiny-gpt2).")] = None,
    device: Annotated[str | None, option(ENGINE, "auto, cuda or emulated (auto).")] = None,
    dtype: Annotated[str | None, option(ENGINE, "float32, bfloat16 or float16 (float32).")] = None,
    staging: Annotated[
        str | None, option(ENGINE, "Pageable copies of the emulated device: copy or sync (copy).")
    ] = None,
    max_batch_size: Annotated[int | None, option(ENGINE, "Requests decoded together (64).")] = None,
    prefill_max_batch_size: Annotated[int | None, option(ENGINE, "Requests prefilled together (64).")] = None,
    prefill_max_tokens: Annotated[int | None, option(ENGINE, "Padded tokens of one prefill (2048).")] = None,
    prefix_cache: Annotated[
        bool | None,
        option(ENGINE, "Keep and share the KV of equal prefixes (off).", "--prefix-cache/--no-prefix-cache"),
    ] = None,
    stream_interval: Annotated[int | None, option(ENGINE, "Tokens per chunk after the first (8).")] = None,
    tokenize_workers: Annotated[
        int | None, option(ENGINE, "Threads that tokenize, with --no-pretok; 0: the scheduler's own (0).")
    ] = None,
    blocks: Annotated[int | None, option(DESIGN, "Blocks, each a boot of every arm (6).")] = None,
    until_decided: Annotated[
        bool, option(DESIGN, "Stop once the verdict is clear: looks at 6, 8, ... blocks.", "--until-decided")
    ] = False,
    until_precision: Annotated[
        str | None, option(DESIGN, "Stop once the interval's half-width is this small, such as 1%.")
    ] = None,
    max_blocks: Annotated[int | None, option(DESIGN, "Most blocks, if it may stop early (20).")] = None,
    plant: Annotated[
        str | None, option(DESIGN, "Delay each step of the after arm by a known share, such as 3%.")
    ] = None,
    plant_at: Annotated[str | None, option(DESIGN, "device or host (device).")] = None,
    rounds: Annotated[
        int | None, option(DESIGN, "Measured rounds of a boot (10 on emulated, 2 on cuda).")
    ] = None,
    warmup_rounds: Annotated[int | None, option(DESIGN, "Rounds of a boot thrown away (1).")] = None,
    margin: Annotated[str | None, option(DESIGN, "Largest change that counts as none (1%).")] = None,
    primary: Annotated[str | None, option(DESIGN, "Metric that decides (tpot_ms_p50).")] = None,
    secondary: Annotated[
        list[str] | None, option(DESIGN, "Further metrics with a verdict, up to five, not the variant's.")
    ] = None,
    seed: Annotated[int | None, option(DESIGN, "Seed of prompts, lengths and arrivals (0).")] = None,
) -> Asked:
    """What every command that measures can be asked for."""
    values = dict(locals())
    return Asked(
        variant=variant,
        engine=engine,
        both=tuple(both or ()),
        before=tuple(before or ()),
        after=tuple(after or ()),
        workload={
            **given(
                values, "prompt", "prompts", "prompt_repeats", "unique_prompts", "input_tokens",
                "max_new_tokens", "num_requests", "arrival", "interval_ms", "arrival_schedule", "rate",
                "burstiness", "ramp_up", "concurrency", "trace", "trace_scale", "pretok", "stop_on_eos",
                "temperature", "top_k", "top_p",
            ),
            **({} if not stop else {"stop": stop}),
        },
        options=given(
            values, "model", "device", "dtype", "staging", "max_batch_size", "prefill_max_batch_size",
            "prefill_max_tokens", "prefix_cache", "stream_interval", "tokenize_workers",
        ),
        design={
            **given(values, "blocks", "rounds", "warmup_rounds", "primary", "seed"),
            **({} if margin is None else {"margin": parse_fraction(margin, "--margin")}),
            **({} if not goodput else {"goodput": parse_goodput(goodput)}),
            **({} if not secondary else {"secondaries": tuple(secondary)}),
        },
        until_decided=until_decided,
        until_precision=fraction(until_precision, "--until-precision"),
        max_blocks=max_blocks,
        plant=fraction(plant, "--plant"),
        plant_at=plant_at,
    )  # fmt: skip


# Options that mean nothing to some commands. What decides a comparison: a profile decides nothing.
OF_A_VERDICT = (
    "blocks", "until_decided", "until_precision", "max_blocks", "plant", "plant_at", "rounds", "margin",
    "primary", "secondary", "goodput",
)  # fmt: skip
# What needs a before and an after: a factorial's toggles say what differs, and its block count is fixed.
OF_TWO_ARMS = (
    "variant", "before", "after", "until_decided", "until_precision", "max_blocks", "plant", "plant_at",
    "secondary",
)  # fmt: skip
# What only a measurement needs: an evaluation asks tasks, and times nothing.
OF_A_MEASUREMENT = (
    *OF_A_VERDICT, "warmup_rounds", "seed", "prompt", "prompts", "prompt_repeats", "unique_prompts",
    "input_tokens", "max_new_tokens", "num_requests", "arrival", "interval_ms", "arrival_schedule", "rate",
    "burstiness", "ramp_up", "concurrency", "trace", "trace_scale", "pretok", "stop_on_eos", "stop",
    "temperature", "top_k", "top_p", "tokenize_workers",
)  # fmt: skip


def measuring(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """`command(asked, ...)` with `asked` replaced by the options of `request`, ahead of its own options and
    `without` those that mean nothing to it."""
    shared, own = signature(request, eval_str=True), signature(command, eval_str=True)
    options = [each for name, each in shared.parameters.items() if name not in without]

    @wraps(command)
    def with_options(**values: Any) -> None:
        asked = request(**{each.name: values.pop(each.name) for each in options})
        with interruptible():
            command(asked, **values)

    joined = [*options, *list(own.parameters.values())[1:]]
    with_options.__signature__ = Signature(joined)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in joined}
    return with_options


def given(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of `names` that were given."""
    return {name: values[name] for name in names if values[name] is not None}


def fraction(text: str | None, flag: str) -> float | None:
    """settings.parse_fraction of an option that may be left out."""
    return None if text is None else parse_fraction(text, flag)
