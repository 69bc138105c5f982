"""The transformers engine, with the real library: its tokens, its order, and what it refuses."""

import json
import os
import select
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC as OVERLAP
from overlap_bench.engines.presets import load_tokenizer
from overlap_bench.engines.transformers.engine import build
from tests.engine.test_real_models import save, tokenizer  # noqa: F401
from tests.support.bench_command import PATIENCE_S
from tests.support.in_process import done
from tests.support.in_process_engine import Collected, generated, near_ties, serve, some_requests

MODELS = ("tiny-gpt2", "tiny-llama")
MODES = ("static", "continuous")
SMALL = {"max_batch_size": 4, "stream_interval": 3, "max_context": 128}
no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is refused where there is no CUDA")


def started(mode: str, sink: Collected, **options: object) -> api.Engine:
    engine = build(api.EngineOptions(**(SMALL | options)), {"batching": mode})  # type: ignore[arg-type]
    engine.start(sink)
    engine.begin_round()
    return engine


def run(engine: api.Engine, sink: Collected, until: Callable[[], bool]) -> None:
    """Serve, as a host would that has no message to deliver, until `until` says so between two steps."""

    def pump(timeout: float | None) -> bool:
        if until():
            return False
        if timeout is None and engine.wake_fd is not None:
            assert select.select([engine.wake_fd], [], [], PATIENCE_S)[0], sink.events
        return True

    engine.run(pump)


def served(mode: str, requests: list[api.Request], **options: object) -> tuple[Collected, api.RoundRecord]:
    sink = Collected()
    engine = started(mode, sink, **options)
    for request in requests:
        engine.submit(request)
    run(engine, sink, lambda: sink.ended == len(requests))
    record = engine.collect()
    engine.stop()
    return sink, record


def chunks(sink: Collected, request: int) -> list[api.Chunk]:
    return [each for each in sink.events if isinstance(each, api.Chunk) and each.id == request]


def tokens(sink: Collected) -> dict[int, list[int]]:
    ids = sorted({each.id for each in sink.events})
    return {each: [token for chunk in chunks(sink, each) for token in chunk.token_ids] for each in ids}


def ends(sink: Collected) -> dict[int, api.Finish]:
    return {each.id: each for each in sink.events if isinstance(each, api.Finish)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_generate_for_each_request_alone(mode: str, model: str) -> None:
    requests = some_requests(10)
    sink, record = served(mode, requests, model=model)
    assert near_ties(model, requests, tokens(sink)) == 0
    assert all(end.reason == "length" for end in ends(sink).values())
    assert record.counters["steps"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_tokens_stream_in_order_and_a_chunk_holds_an_interval(mode: str) -> None:
    requests = [api.Request(number, [number + 1, 2, 3], 8) for number in range(3)]
    sink, _ = served(mode, requests)
    for request in requests:
        mine = chunks(sink, request.id)
        assert [len(chunk.token_ids) for chunk in mine] == [1, 3, 3, 1]
        stamps = [stamp for chunk in mine for stamp in chunk.token_ns]
        end = ends(sink)[request.id]
        assert all(earlier <= later for earlier, later in pairwise(stamps))
        assert end.accepted_ns <= end.tokenized_ns <= end.admitted_ns <= stamps[0]
        assert (end.prompt_tokens, end.completion_tokens, len(stamps)) == (3, 8, 8)
        assert sink.events.index(end) > sink.events.index(mine[-1])


@pytest.mark.parametrize("mode", MODES)
def test_an_end_of_text_ends_its_own_request_alone(mode: str) -> None:
    prompts = [[number + 1, 7, 9] for number in range(4)]
    whole = generated("tiny-llama", [api.Request(each, prompt, 12) for each, prompt in enumerate(prompts)])
    eos = whole[1][4]
    sink = Collected()
    engine = started(mode, sink, model="tiny-llama")
    engine.eos = frozenset({eos})  # type: ignore[attr-defined]
    for number, prompt in enumerate(prompts):
        engine.submit(api.Request(number, prompt, 12, stop_on_eos=number != 2))
    run(engine, sink, lambda: sink.ended == 4)
    engine.stop()
    for number, expected in whole.items():
        stops = number != 2 and eos in expected
        assert tokens(sink)[number] == (expected[: expected.index(eos) + 1] if stops else expected)
        assert ends(sink)[number].reason == ("eos" if stops else "length")
    assert ends(sink)[1].reason == "eos"


@pytest.mark.parametrize("mode", MODES)
def test_texts_and_stop_strings_are_the_overlap_engines(device, mode: str) -> None:
    read = load_tokenizer("tiny-gpt2", 4096)
    asked = [api.Request(number, "the yield statement"[: 4 + number], 24) for number in range(4)]
    ids = generated("tiny-gpt2", [msgspec.structs.replace(asked[1], prompt=read.encode(asked[1].prompt).ids)])
    stop = read.decode(ids[1][6:8]).strip()
    asked[1] = msgspec.structs.replace(asked[1], stop=[stop])
    settings = OVERLAP.check({"schedule": "overlap", "launch": "inline", "graph": "on"})
    expected, events, _ = serve(device, settings, asked, **SMALL)
    sink, _ = served(mode, asked)
    other = Collected(events=events)
    assert ends(sink)[1].reason == "stop"
    for number in range(4):
        assert tokens(sink)[number] == expected[number]
        text, other_text = ("".join(each.text for each in chunks(one, number)) for one in (sink, other))
        assert text == other_text
        assert ends(sink)[number].reason == ends(other)[number].reason
        assert ends(sink)[number].completion_tokens == ends(other)[number].completion_tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_comes_meanwhile_waits_for_the_batch_or_joins_it(mode: str) -> None:
    sink = Collected()
    engine = started(mode, sink, stream_interval=1)
    engine.submit(api.Request(0, [1, 2, 3], 60))
    late = False

    def until() -> bool:
        nonlocal late
        if not late and len(chunks(sink, 0)) >= 2:
            late = True
            engine.submit(api.Request(1, [4, 5], 4))
        return sink.ended == 2

    run(engine, sink, until)
    engine.stop()
    last = chunks(sink, 0)[-1].token_ns[-1]
    assert (ends(sink)[1].admitted_ns > last) == (mode == "static")
    assert tokens(sink) == generated("tiny-gpt2", [api.Request(0, [1, 2, 3], 60), api.Request(1, [4, 5], 4)])


def test_rows_that_ended_are_computed_on_in_a_static_batch_and_counted() -> None:
    _, record = served("static", [api.Request(0, [1, 2], 2), api.Request(1, [3], 9)])
    assert record.counters == {"batches": 1, "steps": 9, "idle_rows": 7}


def test_a_static_batch_never_runs_out_of_positions(tmp_path: Path, tokenizer: Path) -> None:  # noqa: F811
    """The row of the long prompt is computed on until the row of the short one has its many tokens."""
    model = save(tmp_path / "model", tokenizer, "gpt2", max_position_embeddings=64)
    requests = [api.Request(0, list(range(1, 41)), 8), api.Request(1, [1, 2, 3], 50)]
    sink, record = served("static", requests, model=model, max_context=64)
    assert {number: len(each) for number, each in tokens(sink).items()} == {0: 8, 1: 50}
    assert record.counters["batches"] == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (api.Request(0, [], 4), "the prompt is empty"),
        (api.Request(0, [1], 0), "max_new_tokens is 0"),
        (api.Request(0, [1] * 120, 9), "a prompt of 120 tokens and 9 new ones exceed max_context=128"),
        (api.Request(0, [4096], 4), "ids beyond the model's vocabulary"),
        (api.Request(0, [1], 4, temperature=0.5), "decodes greedily"),
        (api.Request(0, [1], 4, stop=[""]), "a stop string is empty"),
        (api.Request(0, "half a character: \ud800", 4), "the prompt can't be tokenized"),
    ],
)
def test_a_bad_request_is_answered(refusing: dict[str, tuple[api.Engine, Collected]], mode, bad, message):
    engine, sink = refusing[mode]
    sink.events.clear()
    engine.submit(bad)
    (answer,) = sink.events
    assert isinstance(answer, api.Error)
    assert message in answer.message


@pytest.fixture(scope="module")
def refusing():
    sinks = {mode: Collected() for mode in MODES}
    engines = {mode: started(mode, sink) for mode, sink in sinks.items()}
    yield {mode: (engines[mode], sinks[mode]) for mode in MODES}
    for engine in engines.values():
        engine.stop()


@pytest.mark.parametrize(
    ("toggles", "options", "message"),
    [
        pytest.param(
            {"batching": "continuous", "async_batching": "on"},
            {},
            "async_batching=on needs CUDA, and this is the CPU",
            marks=no_card,
        ),
        pytest.param(
            {"batching": "continuous", "cuda_graph": "on"}, {}, "cuda_graph=on needs CUDA", marks=no_card
        ),
        pytest.param({}, {"device": "cuda"}, "torch finds no CUDA device here", marks=no_card),
        ({"batching": "static", "cuda_graph": "on"}, {}, "cuda_graph applies only with batching=con"),
        ({}, {"device": "emulated"}, "runs on the CPU or on CUDA, not on the emulated device"),
        ({}, {"sampling": True}, "decodes greedily: leave --temperature at 0"),
        ({}, {"staging": "sync"}, "engine transformers has no staging: leave it out"),
        ({}, {"prefix_cache": True}, "engine transformers has no prefix_cache"),
        ({}, {"max_context": 2048}, "tiny-gpt2 has 1024 positions"),
        ({"batching": "continuous"}, {"block_size": 2}, "size must be at least 4"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_serves(toggles, options, message) -> None:
    with pytest.raises(api.BadSetting, match=message):
        build(api.EngineOptions(**options), toggles).start(Collected())


def test_both_ways_of_batching_are_measured_against_each_other(tmp_path: Path) -> None:
    asked = ("--num-requests", "4", "--max-new-tokens", "8", "--arrival", "closed", "--concurrency", "2")
    ways = ("--before", "batching=static", "--after", "batching=continuous", "--trials", "1", "--rounds", "1")
    stdout = done(
        dict(os.environ), tmp_path, "run", "--engine", "transformers", *ways, *asked, "--format", "json"
    )
    result = json.loads(stdout)
    (compared,) = result["comparisons"]
    assert result["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert compared["outputs"]["identical"] == compared["outputs"]["compared"] == 4
    assert compared["mechanism"]["steps"]["after"] > 0
    assert compared["mechanism"]["idle_rows"]["after"] is None  # what it can't tell is absent
