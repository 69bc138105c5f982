"""Other tools, clients and tasks: `bench import`, `mock`, `eval`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from overlap_bench.engines import api
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.options import (
    DESIGN,
    ENGINE,
    OF_A_MEASUREMENT,
    OUTPUT,
    RESULTS,
    Debug,
    Form,
    Out,
    Whole,
    argument,
    measuring,
    option,
)
from overlap_bench.harness.cli.printing import Format, say
from overlap_bench.harness.common.processes import interruptible
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.plan.settings import make_design, parse_goodput


def import_(
    files: Annotated[
        list[str],
        argument(
            "Result of vllm bench serve, sglang.bench_serving, guidellm or aiperf; FILE:N, the N-th in it.",
            metavar="FILE...",
        ),
    ],
    name: Annotated[str | None, option(OUTPUT, "What the run is called (the tool's name).")] = None,
    engine_name: Annotated[str | None, option(ENGINE, "The engine that was measured.")] = None,
    fresh_boots: Annotated[
        bool, option(DESIGN, "Each file is from a fresh server: a trial each.", "--fresh-boots")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        option(DESIGN, "Limits of a good request: ttft:200, tpot:50, latency:2000, ms (the file's count)."),
    ] = None,
    whole: Whole = False,
    out: Out = RESULTS,
    format: Form = Format.TABLE,
    debug: Debug = False,
) -> None:
    """Turn another tool's result file into a run, for compare and report; what it lacks is named."""
    from overlap_bench.harness.studies.imports import run as importing

    folder, result = importing.bring(
        files,
        out,
        name=name,
        engine=engine_name,
        fresh_boots=fresh_boots,
        goodput=parse_goodput(goodput or ()),
    )
    say(f"written to {folder}")
    printing.show(result, format, whole)


SERVER = "Server"
Host = Annotated[str, option(SERVER, "Address to listen on (127.0.0.1: this machine alone).")]
Port = Annotated[int, option(SERVER, "0: any that is free; the address is printed (8000).")]
TtftMs = Annotated[float, option(SERVER, "From arrival to the first token (50).")]
ItlMs = Annotated[float, option(SERVER, "Between two tokens (10).")]
MostPerChunk = Annotated[int, option(SERVER, "Chunks hold 1, 2, ... this many tokens, in turn (1).")]


def mock(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ttft_ms: TtftMs = 50.0,
    itl_ms: ItlMs = 10.0,
    max_tokens_per_chunk: MostPerChunk = 1,
    debug: Debug = False,
) -> None:
    """Answer as OpenAI's API does, with tokens at known times, to check what a client measures.

    GET /lateness says how late the mock itself was, in microseconds, since the last DELETE /lateness."""
    from overlap_bench.harness.serve import mock

    with interruptible():
        mock.run(mock.make_timing(ttft_ms, itl_ms, max_tokens_per_chunk), host, port)


def serve(
    as_mock: Annotated[bool, option(SERVER, "Needed: there is no engine behind it.", "--mock")] = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ttft_ms: TtftMs = 50.0,
    itl_ms: ItlMs = 10.0,
    max_tokens_per_chunk: MostPerChunk = 1,
    debug: Debug = False,
) -> None:
    """The old name of `bench mock`."""
    if not as_mock:
        raise api.BadSetting(
            "bench serves no engine any more: bench mock is a server with tokens at known times, and "
            "bench run --engine openai --before cmd='…' measures your own server"
        )
    mock(host, port, ttft_ms, itl_ms, max_tokens_per_chunk)


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
    from overlap_bench.harness.common.machine import guess_device
    from overlap_bench.harness.plan.variants import load_variants

    engines = api.find_engines()
    design = make_design(request, engines, load_variants(), guess_device)

    from overlap_bench.harness.studies.evaluation import evaluate

    names = tuple(tasks.split(","))
    evaluate.check(names, limit, num_fewshot)
    arms = evaluate.scoring(engines, design.arms)
    result, differ = evaluate.evaluate(design.name, arms, names, limit, num_fewshot, out, say)
    printing.end_with(result, format, differ)
