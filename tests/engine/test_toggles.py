"""What a toggle does besides leaving the tokens as they are: by its counters and the step records."""

import gc
import sys
import threading
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import DeviceLost
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.toggles import gc as gc_toggle
from overlap_bench.engines.overlap.toggles import launch, tables
from tests.support import in_process_engine
from tests.support.bench_command import PATIENCE_S
from tests.support.in_process_engine import serve, some_requests

INLINE = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"}
THREAD = {"schedule": "overlap", "launch": "thread", "graph": "on"}


def steps_of(record: api.RoundRecord) -> list[dict[str, int]]:
    table = record.steps
    rows = np.frombuffer(table.data, dtype=np.int64).reshape(table.rows, -1)
    return [dict(zip(table.columns, row.tolist(), strict=True)) for row in rows]


# -- launch ---------------------------------------------------------------------------------------------


def test_a_forward_thread_that_can_not_begin_is_told_of_by_its_first_step():
    def lost():
        raise DeviceLost("the card is gone")

    forward = SimpleNamespace(device=SimpleNamespace(adopt_thread=lost))
    thread = launch.ForwardThread(forward, Counter())
    step = SimpleNamespace(launch_done=threading.Event())
    thread.submit(step)
    assert step.launch_done.wait(PATIENCE_S)
    with pytest.raises(DeviceLost, match="the card is gone"):
        thread.wait_until_issued(step)
    thread.stop()


# -- d2h ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launching", ["inline", "thread"])
@pytest.mark.parametrize(("choice", "waiting"), [("event", "MainThread"), ("thread", "reader")])
def test_one_thread_waits_for_all_sampled_ids(device, monkeypatch, launching, choice, waiting):
    waited, synchronize = [], device.synchronize

    def synchronized(event):
        waited.append(threading.current_thread().name)
        synchronize(event)

    monkeypatch.setattr(device, "synchronize", synchronized)  # h2d=pageable waits for no event
    full_settings = SPEC.check({"schedule": "overlap", "launch": launching, "d2h": choice})
    _, _, record = serve(device, full_settings, some_requests(4))
    assert waited == [waiting] * record.steps.rows
    assert ("reader_wait_ns" in record.counters) == (choice == "thread")
    assert "reader" not in {each.name for each in threading.enumerate()}, "it ends with the engine"


def test_ids_that_lay_ready_are_told_from_ids_that_were_waited_for(device):
    settings = SPEC.check({"schedule": "overlap", "launch": "inline", "d2h": "thread"})
    asked = [api.Request(0, [1, 2, 3], 12)]

    def dawdle(engine: api.Engine, events: list[api.Event]) -> None:
        time.sleep(0.03)  # the step that was launched takes a tenth of that

    _, _, ready = serve(device, settings, asked, meanwhile=dawdle)
    assert ready.counters["reader_ahead"] > 6
    _, _, waited = serve(device, settings, asked, plant_at="device", plant_ns=30_000_000)
    assert waited.counters["reader_ahead"] < 6
    assert waited.counters["reader_wait_ns"] > 6 * 30_000_000


def test_what_fails_on_the_reader_is_raised_where_its_step_is_waited_for(device, monkeypatch):
    def lost(event):
        raise DeviceLost("the card is gone")

    monkeypatch.setattr(device, "synchronize", lost)
    with pytest.raises(DeviceLost, match="the card is gone"):
        serve(device, SPEC.check({"schedule": "overlap", "d2h": "thread"}), some_requests(2))
    assert "reader" not in {each.name for each in threading.enumerate()}


# -- tables ---------------------------------------------------------------------------------------------


def test_only_rows_that_changed_are_sent(device):
    requests = some_requests(12)
    sent = {}
    for choice in tables.TOGGLE.choices:
        full_settings = SPEC.check(INLINE | {"tables": choice})
        _, _, record = serve(device, full_settings, requests, max_batch_size=6, max_context=128)
        sent[choice] = record.counters
    decoding = sum(request.max_new_tokens > 1 for request in requests)
    assert decoding <= sent["dirty-rows"]["table_rows"] < sent["full"]["table_rows"]
    assert sent["dirty-rows"]["table_bytes"] == sent["dirty-rows"]["table_rows"] * 128 // 16 * 4
    steps = sent["full"]["h2d_pinned_copies"]
    assert sent["dirty-rows"]["h2d_pinned_copies"] == steps + sent["dirty-rows"]["table_rows"]


# -- prefill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launching", [INLINE, THREAD], ids=["inline", "thread"])
@pytest.mark.parametrize("choice", ["overlap", "consecutive-sync"])
def test_of_two_prefills_in_a_row_one_is_processed_before_the_other_is_launched(device, launching, choice):
    full_settings = SPEC.check(launching | {"prefill": choice})
    requests = [api.Request(number, [number + 1, 5, 6], 3) for number in range(6)]
    _, _, record = serve(device, full_settings, requests, prefill_max_batch_size=2)
    prefills, decodes = steps_of(record)[:3], steps_of(record)[3:]
    assert [step["kind"] for step in prefills] == [api.STEP_KINDS.index("prefill")] * 3
    if choice == "consecutive-sync":
        assert all(first["append.end"] < second["launch.start"] for first, second in pairwise(prefills))
    elif launching is INLINE:  # a forward thread may lose its core, and launch later
        assert all(first["append.end"] > second["launch.start"] for first, second in pairwise(prefills))
    if launching is INLINE:
        assert all(first["append.start"] > second["h2d.start"] for first, second in pairwise(decodes))
    assert record.counters["consecutive_prefills"] == 2
    assert ("prefill_processing_ns" in record.counters) == (choice == "consecutive-sync")


# -- chunk, steps, spec ---------------------------------------------------------------------------------


def kinds_of(record: api.RoundRecord) -> Counter[str]:
    return Counter(api.STEP_KINDS[step["kind"]] for step in steps_of(record))


def test_prompts_in_chunks_run_beside_rows_that_decode(device):
    requests = [api.Request(0, [1, 2, 3], 20), api.Request(1, list(range(1, 41)), 4)]
    seen = {}
    for choice in ("off", "on"):
        _, _, record = serve(device, SPEC.check(INLINE | {"chunk": choice}), requests, chunk_tokens=16)
        seen[choice] = kinds_of(record)["mixed"], record.counters.get("prompt_chunks")
    assert seen == {"off": (0, None), "on": (3, 3)}, "16 + 16 + 8 tokens"


def test_eight_steps_are_one_and_what_they_compute_past_an_end_is_counted(device):
    requests = [api.Request(number, [number + 1, 5, 6], 1 + (12 if number else 4)) for number in range(4)]
    _, _, record = serve(device, SPEC.check(INLINE | {"steps": "8"}), requests)
    decodes = [step for step in steps_of(record) if api.STEP_KINDS[step["kind"]] == "decode"]
    assert [step["given"] for step in decodes] == [4 + 3 * 8, 3 * 4]
    assert record.counters["tokens_past_end"] == 4 + 3 * 4
    assert record.counters["captured_launches"] == 2


@pytest.mark.parametrize("who", ["host", "device"])
def test_drafts_that_are_kept_save_steps_and_no_token_is_another(device, who):
    requests = [api.Request(number, [number + 1, 5, 6, 7], 48) for number in range(4)]
    options = {"model": "echo-gpt2", "max_batch_size": 4}
    plain, _, slow = serve(device, SPEC.check(INLINE), requests, **options)
    settings = SPEC.check(INLINE | {"spec": "ngram", "accept": who})
    tokens, _, record = serve(device, settings, requests, **options)
    assert tokens == plain
    counters = record.counters
    assert 0 < counters["accepted_drafts"] < counters["draft_tokens"]
    assert kinds_of(record)["decode"] < kinds_of(slow)["decode"]
    given = sum(step["given"] for step in steps_of(record))
    assert given == 4 * 48


def passed(passes: Counter[str], engine: api.Engine, events: list[api.Event]) -> None:
    passes["pump"] += 1


def test_only_counts_that_stay_on_the_device_let_the_next_step_be_launched_meanwhile(device):
    requests = [api.Request(number, [number + 1, 5, 6, 7], 24) for number in range(3)]
    ahead = {}
    for who in ("host", "device"):
        settings, passes = SPEC.check(INLINE | {"spec": "ngram", "accept": who}), Counter()
        count = partial(passed, passes)
        _, _, record = serve(device, settings, requests, model="echo-gpt2", meanwhile=count)
        assert passes["pump"] <= len(steps_of(record)) + 2  # a turn counts them for steps
        decodes = [step for step in steps_of(record) if api.STEP_KINDS[step["kind"]] == "decode"]
        ahead[who] = sum(
            second["launch.start"] < first["append.start"] for first, second in pairwise(decodes)
        ) / len(decodes)
    assert ahead["host"] == 0
    assert ahead["device"] > 0.8


def test_scoring_is_refused_where_a_step_gives_several_tokens(device):
    for today in ({"steps": "8"}, {"spec": "ngram"}):
        with pytest.raises(api.BadSetting, match="scoring goes with steps=1 and spec=off"):
            serve(device, SPEC.check(INLINE | today), some_requests(1), scoring=True)


# -- gil ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["default", "fast-switch"])
def test_the_switch_interval_holds_while_the_engine_serves_and_no_longer(device, choice):
    before = sys.getswitchinterval()
    _, _, record = serve(device, SPEC.check(THREAD | {"gil": choice}), some_requests(3))
    interval_ns = {"default": round(before * 1e9), "fast-switch": 50_000}[choice]
    assert record.counters["switch_interval_ns"] == record.steps.rows * interval_ns
    assert record.counters["launch_lag_ns"] > 0
    assert sys.getswitchinterval() == before


# -- gc -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["default", "frozen"])
def test_what_was_made_before_is_frozen_while_the_engine_serves_and_no_longer(device, monkeypatch, choice):
    seen, send = [], in_process_engine.Collected.send

    def look(sink: in_process_engine.Collected, events: list[api.Event]) -> None:
        seen.append((gc.get_freeze_count() > own, gc.isenabled()))
        send(sink, events)

    monkeypatch.setattr(in_process_engine.Collected, "send", look)
    own = gc.get_freeze_count()  # Python 3.12 begins with some of its own
    _, _, record = serve(device, SPEC.check(INLINE | {"gc": choice}), some_requests(3))
    assert set(seen) == {(choice == "frozen", True)}
    assert gc.get_freeze_count() <= own
    assert set(gc_toggle.TOGGLE.counters) <= record.counters.keys()


def test_collections_and_the_time_in_them_are_counted():
    counters = Counter()
    with gc_toggle.counted(counters):
        gc.collect(0)
        gc.collect()
    gc.collect()
    assert counters["gc_full_collections"] == 1
    assert counters["gc_collections"] >= 2  # the collector may have run by itself
    assert counters["gc_ns"] > 0
