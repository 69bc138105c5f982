"""SGLang's own server on a CPU, where BENCH_SGLANG names an interpreter that has it (engines/README.md)."""

import os
from collections.abc import Iterator
from itertools import pairwise

import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import SPEC, engine, server
from overlap_bench.engines.openai.endpoint import Endpoint
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.presets.checkpoints import save
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import records
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.workload.plan import Planned
from tests.support.bench_command import PATIENCE_S
from tests.support.in_process_engine import Collected

PYTHON = os.environ.get("BENCH_SGLANG", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="BENCH_SGLANG names no interpreter that has SGLang")
ON_A_CPU = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch "
    "--grammar-backend none --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled "
    "--max-total-tokens 4096 --max-running-requests 16 --mem-fraction-static 0.1 --sleep-on-idle"
)
TOKENS, REQUESTS = 48, 4
PROMPTS = [[number + 5] * 8 for number in range(REQUESTS)]
# Now and then its server sends two tokens in one chunk, where its processes come late: that turn has no pair.
MISSED = 2


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2: it has no rotary embedding, for which SGLang wants a kernel."""
    model = tmp_path_factory.mktemp("model")
    save(PRESETS["tiny-gpt2"], model)
    (model / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    return f"{PYTHON} -m sglang.launch_server --model-path {model} --port {{port}} {ON_A_CPU}"


@pytest.fixture(scope="module")
def running(command: str) -> Iterator[Endpoint]:
    started = server.start(command, {})
    try:
        started.wait_until_ready(PATIENCE_S)
        yield started.endpoint
    finally:
        started.stop()


def tree(booted: Booted) -> list[psutil.Process]:
    top = psutil.Process(booted.description.pids["server"])
    return [top, *top.children(recursive=True)]


def ask(where: Endpoint, kind: str, count: str) -> tuple[list[api.Event], dict[str, int]]:
    """What comes of REQUESTS prompts, and the counters."""
    settings = SPEC.check({"url": where.url, "api": kind, "count": count})
    built, sink = engine.build(api.EngineOptions(model=""), settings), Collected()
    try:
        described = built.start(sink)
        assert described.model["context"] == 1024
        built.begin_round()
        for number in range(REQUESTS):
            built.submit(api.Request(number, "Hello " * (number + 1), TOKENS))
        built.run(lambda timeout: sink.ended < REQUESTS)
        return sink.events, built.collect().counters
    finally:
        built.stop()


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("completions", "usage"),
        ("completions", "ids"),
        ("completions", "logprobs"),
        ("chat", "usage"),
        ("chat", "logprobs"),
    ],
)
def test_every_token_is_counted(running: Endpoint, kind: str, count: str) -> None:
    events, counters = ask(running, kind, count)
    ends = [each for each in events if isinstance(each, api.Finish)]
    assert [each.completion_tokens for each in ends] == [TOKENS] * REQUESTS, events
    assert {each.reason for each in ends} == {"length"}
    assert all(each.prompt_tokens > 0 for each in ends)
    assert counters[f"requests_counted_by_{count}"] == REQUESTS
    if kind == "completions" and count != "usage":
        chunks = [each for each in events if isinstance(each, api.Chunk)]
        assert sum(len(each.token_ids) or each.tokens or 0 for each in chunks) == TOKENS * REQUESTS


def test_a_chat_that_it_refuses_to_give_ids_for_fails_with_its_words(running: Endpoint) -> None:
    events, _ = ask(running, "chat", "ids")
    assert len(events) == REQUESTS
    for each in events:
        assert isinstance(each, api.Error)
        assert "return_token_ids is not supported with streaming" in each.message


def test_it_takes_turns_with_and_without_its_overlap_schedule(command: str) -> None:
    """The scheduler, the detokenizer and the HTTP server are three processes, and stand still as one."""
    commands = {"before": f"{command} --disable-overlap-schedule", "after": command}
    with Session() as session:
        arms = [
            Arm(
                name=name,
                engine="openai",
                options=api.EngineOptions(model=""),
                toggles=SPEC.check({"cmd": each, "count": "ids"}),
            )
            for name, each in commands.items()
        ]
        booted = list(session.boot(arms).values())
        processes = [process for each in booted for process in tree(each)]
        assert len(processes) >= 2 * 3
        for each in booted:
            assert each.description.takes_turns
            session.begin(each)
        asked = [Planned(number, 0, prompt, TOKENS, False) for number, prompt in enumerate(PROMPTS)]
        done = session.take_turns(booted, asked, SPEC.turn_steps, lambda progress: None)
        assert not any(done.data.errors)
        assert records.requests_frame(done)["completion_tokens"].tolist() == [TOKENS] * 2 * REQUESTS
        assert done.data.digests[:REQUESTS] == done.data.digests[REQUESTS:]
        assert len(set(done.data.digests)) > 1
        spans = []
        for each in booted:
            record, turns = session.collect_turns(each)
            frame, found = records.turns_frame(turns), records.steps_frame(record)
            spans += list(zip(frame["taken_ns"], frame["drained_ns"], strict=True))
            sliced = slices.of_turns(found, frame, lead=2)
            assert slices.busy_while_parked(sliced) < 0.2
            whole = slices.decode_slices(sliced.assign(round=0))
            assert len(whole) >= TOKENS // SPEC.turn_steps - 2 - MISSED
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))
        assert session.shut(booted) == []
        _, left = psutil.wait_procs(processes, PATIENCE_S)
        assert not left
