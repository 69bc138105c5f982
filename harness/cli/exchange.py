"""Other tools, clients and tasks: `bench import`, `serve`, `eval`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from engines import api
from harness.cli import printing
from harness.cli.exit_codes import say
from harness.cli.options import (
    DESIGN,
    ENGINE,
    OF_A_MEASUREMENT,
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    argument,
    measuring,
    option,
)
from harness.cli.printing import Format
from harness.common.signals import interruptible
from harness.plan.request import Request
from harness.plan.settings import make_design, parse_goodput


def import_(
    files: Annotated[
        list[str],
        argument(
            "Result of vllm bench serve, sglang.bench_serving, guidellm or aiperf; FILE:N, its N-th.",
            metavar="FILE...",
        ),
    ],
    name: Annotated[str | None, option(OUTPUT, "What the run is called (the tool's name).")] = None,
    engine_name: Annotated[str | None, option(ENGINE, "The engine that was measured.")] = None,
    fresh_boots: Annotated[
        bool, option(DESIGN, "Each file is from a fresh server: a block each.", "--fresh-boots")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        option(DESIGN, "Limits of a good request: ttft:200, tpot:50, latency:2000, ms (the file's count)."),
    ] = None,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Turn another tool's result file into a run, for compare and report; what it lacks is named."""
    from harness.studies.imports import run as importing

    folder, result = importing.bring(
        files,
        out,
        name=name,
        engine=engine_name,
        fresh_boots=fresh_boots,
        goodput=parse_goodput(goodput or ()),
    )
    say(f"written to {folder}")
    printing.show(result, format)


SERVER, MOCK = "Server", "Mock server"
OF_SERVER = ("variant", "engine", "both", "model", "device", "api_key", "max_requests", "grace_s")
OF_MOCK = ("ttft_ms", "itl_ms", "max_tokens_per_chunk")


def serve(
    variant: Annotated[
        str | None, option(None, "Serve the after arm of this pair (all); `bench variants`.")
    ] = None,
    engine: Annotated[
        str | None, option(None, "Serve this engine with its first choices, in place of a variant.")
    ] = None,
    both: Annotated[
        list[str] | None, option(None, "key=value: a toggle, an engine option, python, env.NAME.", "--set")
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
        int | None, option(SERVER, "Requests in flight or on their way there; more are answered 429 (1024).")
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
    /metrics.

    A prompt with more bytes than the tokens of the context can stand for is refused before it is tokenized;
    so are more than 16 stop strings, and longer ones than 256 characters."""
    given: dict[str, object] = {name: value for name, value in locals().items() if value is not None}
    of_engine = {name: value for name, value in given.items() if name in OF_SERVER}
    of_mock = {name: value for name, value in given.items() if name in OF_MOCK}

    from harness.serve import asking

    with interruptible():
        if mock:
            asking.serve_mock(of_mock, of_engine, host, port)
        else:
            asking.serve_engine(of_engine, of_mock, host, port)


EVAL = "Evaluation"


@partial(measuring, without=OF_A_MEASUREMENT)
def eval_(
    request: Request,
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
    from harness.common.machine import guess_device
    from harness.plan.variants import load_variants

    engines = api.find_engines()
    design = make_design(request, engines, load_variants(), guess_device)

    from harness.studies.evaluation import evaluate

    names = tuple(tasks.split(","))
    evaluate.check(names, limit, num_fewshot)
    arms = evaluate.scoring(engines, design.arms)
    found = evaluate.evaluate(design.name, arms, names, limit, num_fewshot, out, say)
    say(f"written to {found.folder}")
    printing.end_with(found.result, format, found.answers_differ)
