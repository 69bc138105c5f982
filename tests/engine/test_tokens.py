"""Greedy tokens equal transformers' generate(), whatever the toggles, with and without chaos."""

import itertools

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.engine import OverlapEngine
from overlap_bench.harness.run.records import device_frame
from tests.engine.conftest import CHAOS_SEED
from tests.support.in_process_engine import (
    Collected,
    column,
    generated,
    near_ties,
    sampled,
    serve,
    some_requests,
)
from tests.support.pairwise import pairwise_cover

MODELS = ("tiny-gpt2", "tiny-llama")


COVER = pairwise_cover(SPEC.every_setting())


def name(settings: dict[str, str]) -> str:
    return ",".join(settings.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", COVER, ids=name)
def test_tokens_equal_generate_under_chaos(chaotic_device, model, settings):
    requests = some_requests(8)
    options = {"model": model, "max_batch_size": 5, "stream_interval": 3, "chunk_tokens": 7}
    options["chaos"] = CHAOS_SEED
    tokens, _, _ = serve(chaotic_device, settings, requests, **options)
    assert near_ties(model, requests, tokens) == 0


SERIAL = SPEC.check({"schedule": "serial", "h2d": "pinned", "output": "deferred", "graph": "on"})
INLINE = SPEC.check(
    {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on", "tables": "dirty-rows"}
)
THREAD = SPEC.check(
    {"schedule": "overlap", "launch": "thread", "sync": "copy-done", "h2d": "pinned", "output": "process"}
)
EIGHT = SPEC.check({"schedule": "overlap", "h2d": "pinned", "graph": "on", "chunk": "on", "steps": "8"})
DRAFTS = SPEC.check({"schedule": "overlap", "graph": "on", "spec": "ngram", "accept": "device"})
APART = (SERIAL, INLINE, THREAD, EIGHT, DRAFTS)  # as far as settings can be


def growing_requests(count: int) -> list[api.Request]:
    """They begin small and end large, so that blocks run out under way."""
    return [msgspec.structs.replace(each, max_new_tokens=24) for each in some_requests(count)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", APART, ids=name)
def test_tokens_equal_generate_when_blocks_run_out(chaotic_device, model, settings):
    requests = growing_requests(10)
    tight = {"block_size": 4, "num_blocks": 1 + 18, "max_context": 64, "prefill_max_tokens": 48}
    options = {"model": model, "max_batch_size": 6, "chaos": CHAOS_SEED, "chunk_tokens": 16}
    tokens, _, record = serve(chaotic_device, settings, requests, **tight, **options)
    assert sum(column(record, "preempted")) > 0
    assert near_ties(model, requests, tokens) == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", APART, ids=name)
def test_tokens_equal_generate_behind_cached_prefixes(chaotic_device, model, settings):
    """Prompts that share their beginning with others, and too few blocks for all of them."""
    requests = [
        msgspec.structs.replace(each, prompt=list(range(40 + each.id % 2))[: 9 * each.id] + each.prompt)
        for each in some_requests(10)
    ]
    tight = {"block_size": 4, "num_blocks": 1 + 40, "max_context": 128, "prefill_max_batch_size": 2}
    options = {"model": model, "max_batch_size": 6, "chaos": CHAOS_SEED, "prefix_cache": True}
    tokens, _, record = serve(chaotic_device, settings, requests, **tight, **options)
    assert record.counters["prefix_cached_tokens"] > 40
    assert near_ties(model, requests, tokens) == 0


def some_sampled_requests() -> list[api.Request]:
    """Some sampled, some behind filters, some greedy beside them."""
    asked = [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {},
        {"temperature": 1.5, "top_p": 0.5},
        {"temperature": 0.9, "top_k": 5},
    ]
    return [
        msgspec.structs.replace(each, seed=each.id // 2 - 2, **asked[each.id % len(asked)])
        for each in growing_requests(7)
    ]


@pytest.mark.parametrize("settings", APART, ids=name)
def test_sampled_tokens_depend_on_seed_and_position_alone(chaotic_device, settings):
    """Not on the toggles, nor on the batch, nor on what is preempted or found in the cache."""
    requests = some_sampled_requests()
    expected = sampled("tiny-gpt2", requests)
    options = {"sampling": True, "max_batch_size": 6, "max_context": 64, "chaos": CHAOS_SEED}
    tight = {"block_size": 4, "num_blocks": 1 + 18, "prefix_cache": True}
    for more in ({}, tight):
        tokens, _, record = serve(chaotic_device, settings, requests, **options, **more)
        assert tokens == expected
    assert sum(column(record, "preempted")) > 0


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_an_eos_ends_a_request_and_nothing_after_it_is_sent(device, schedule):
    requests = some_requests(8)
    expected = generated("tiny-gpt2", requests)
    longest = max(expected.values(), key=len)
    eos = longest[len(longest) // 2]
    stopping = [type(each)(each.id, each.prompt, each.max_new_tokens, True) for each in requests]
    settings = SPEC.check({"schedule": schedule, "h2d": "pinned", "graph": "on"})
    tokens, _, record = serve(device, settings, stopping, eos=frozenset({eos}), max_batch_size=4)
    for request in requests:
        whole = expected[request.id]
        assert tokens[request.id] == (whole[: whole.index(eos) + 1] if eos in whole else whole)
    stopped_early = sum(eos in whole[:-1] for whole in expected.values())
    dropped = record.counters.get("dropped_rows", 0)
    # A stopped request was in the step in flight, and lost a row there, unless that step was a prefill.
    assert 1 <= dropped <= stopped_early if schedule == "overlap" else dropped == 0


@pytest.mark.parametrize("launch", ["inline", "thread"])
def test_records_that_are_taken_at_once_hold_the_step_that_the_last_eos_left_in_flight(device, launch):
    requests = some_requests(8)
    expected = generated("tiny-gpt2", requests)
    request, eos = next(
        (request, token)
        for request in requests
        for whole in [expected[request.id]]
        for place, token in enumerate(whole)
        if 2 <= place < len(whole) - 1 and token not in whole[:place]
    )
    stopping = [type(request)(request.id, request.prompt, request.max_new_tokens, True)]
    settings = SPEC.check({"schedule": "overlap", "launch": launch, "h2d": "pinned", "graph": "on"})
    _, _, record = serve(device, settings, stopping, eos=frozenset({eos}))
    assert record.counters["dropped_rows"] == 1
    assert column(record, "dropped")[-1] == 1
    assert column(record, "append.end")[-1] > 0
    work = device_frame(record)
    ran = work[work["kind"] == "program"]["step"]
    assert set(ran) >= set(column(record, "step"))  # each ran on the device, and is there


def test_the_first_token_goes_out_alone_and_the_others_by_stream_interval(device):
    settings = SPEC.check({"schedule": "overlap", "launch": "inline", "h2d": "pinned", "graph": "on"})
    _, events, record = serve(device, settings, [api.Request(0, [5, 6, 7], 12)], stream_interval=4)
    chunks = [event for event in events if isinstance(event, api.Chunk)]
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 3]
    assert isinstance(events[-1], api.Finish)
    assert all(len(chunk.token_ns) == len(chunk.token_ids) for chunk in chunks)
    assert record.steps.rows == 12, "a length finish costs no step too many"
    assert record.counters.get("dropped_rows", 0) == 0


def test_a_request_that_cannot_run_is_answered_with_one_line_and_the_others_run(device):
    settings = SPEC.check({"schedule": "serial"})
    refused = [api.Request(0, [], 4), api.Request(2, [1] * 500, 40)]
    tokens, events, _ = serve(device, settings, [refused[0], api.Request(1, [5], 2), refused[1]])
    assert [each for each in events if isinstance(each, api.Error)] == [
        api.Error(0, "the prompt is empty"),
        api.Error(2, "a prompt of 500 tokens and 40 new ones exceed max_context=512"),
    ]
    assert len(tokens[1]) == 2


def test_tokens_are_promised_whatever_the_batch_in_fp32_and_never_on_a_card(device, monkeypatch):
    promised = {}
    for kind, dtype in (("emulated", "float32"), ("emulated", "bfloat16"), ("cuda", "float32")):
        monkeypatch.setattr(device, "kind", kind)
        options = api.EngineOptions(dtype=dtype, max_batch_size=1, max_context=32)
        engine = OverlapEngine(options, {}, device=device)
        promised[kind, dtype] = engine.start(Collected()).deterministic
        engine.stop()
    assert [each for each, equal in promised.items() if equal] == [("emulated", "float32")]


def test_a_models_whole_context_is_served_in_blocks_that_do_not_divide_it(device):
    requests = some_requests(1)
    settings = SPEC.check({"schedule": "serial"})
    whole = {"max_batch_size": 1, "block_size": 24, "max_context": 1024}
    tokens, _, _ = serve(device, settings, requests, **whole)
    assert tokens == generated("tiny-gpt2", requests)
    with pytest.raises(api.BadSetting, match="has 1024 positions: set max_context to that or less"):
        serve(device, settings, requests, **whole | {"max_context": 1025})


@pytest.mark.parametrize("settings", COVER, ids=name)
def test_an_engine_that_drains_between_two_steps_has_nothing_left_to_do_and_the_same_tokens(device, settings):
    """As it does at the end of its turn: no step in flight, and every token that was appended is sent."""
    requests = some_requests(8)
    calls = itertools.count()

    def drain(engine: OverlapEngine, events: list[api.Event]) -> None:
        if next(calls) % 3:
            return
        engine.drain()
        loop = engine._loop
        assert loop.in_flight is None
        if settings["output"] != "process":
            sent = {each.id: 0 for each in requests}
            for event in events:
                if isinstance(event, api.Chunk):
                    sent[event.id] += len(event.token_ids)
            assert all(len(active.tokens) == sent[active.request.id] for active in loop.scheduler.running)

    tokens, _, _ = serve(device, settings, requests, max_batch_size=6, stream_interval=1, meanwhile=drain)
    assert near_ties("tiny-gpt2", requests, tokens) == 0
