"""Tokenizing on worker threads: the same tokens, nothing lost, a loop that sleeps is woken."""

import os
import select
import threading
from collections.abc import Iterator
from time import perf_counter_ns, sleep

import pytest
from tokenizers import Tokenizer

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.tokenizing import Tokenized, Tokenizing, encode
from overlap_bench.engines.presets import load_tokenizer
from tests.support.bench_command import PATIENCE_S
from tests.support.in_process_engine import serve

TEXTS = (
    "Hello",
    "The scheduler waits.",
    "A thread that sleeps right after it ran owes the others time. " * 4,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("tiny-gpt2", 4096)


@pytest.fixture
def tokenizing(tokenizer: Tokenizer) -> Iterator[Tokenizing]:
    workers = Tokenizing(tokenizer, 3)
    yield workers
    workers.stop()


def requests(count: int) -> list[api.Request]:
    return [api.Request(number, f"{number} {TEXTS[number % 3]}", 5) for number in range(count)]


@pytest.mark.parametrize("schedule", ["serial", "overlap"])
def test_tokens_are_the_same_wherever_text_is_tokenized(device: Device, schedule: str) -> None:
    settings = SPEC.check({"schedule": schedule})
    here, _, _ = serve(device, settings, requests(12), max_batch_size=4)
    there, events, _ = serve(device, settings, requests(12), max_batch_size=4, tokenize_workers=2)
    assert here == there
    finishes = [event for event in events if isinstance(event, api.Finish)]
    assert len(finishes) == 12
    assert all(
        each.accepted_ns < each.tokenized_ns <= each.queued_ns <= each.admitted_ns for each in finishes
    )


def test_nothing_is_lost_and_a_result_wakes_the_loop(tokenizing: Tokenizing, tokenizer: Tokenizer) -> None:
    """A pump that blocks until it is woken: a lost wake-up would end it by its time limit."""
    taken: list[Tokenized] = []

    def wait(timeout: float | None) -> bool:
        return bool(select.select([tokenizing.wake_fd], [], [], PATIENCE_S)[0])

    pump = tokenizing.feeding(wait, taken.append)
    asked = requests(300)
    for request in asked:
        tokenizing.submit(request, 7)
    while len(taken) < len(asked):
        assert pump(None), f"asleep with {len(taken)} of {len(asked)}"
    assert {each.request.id: each.prompt for each in taken} == {
        each.id: tokenizer.encode(str(each.prompt)).ids for each in asked
    }
    assert {each.accepted_ns for each in taken} == {7}
    assert not select.select([tokenizing.wake_fd], [], [], 0)[0]  # and it can sleep again


def test_a_turn_begins_once_all_texts_have_ids(
    monkeypatch: pytest.MonkeyPatch, tokenizing: Tokenizing
) -> None:
    """Else an engine with nothing else to do would take itself for done."""

    def slow(tokenizer: Tokenizer, text: str) -> list[int]:
        sleep(0.02)
        return encode(tokenizer, text)

    monkeypatch.setattr("overlap_bench.engines.overlap.tokenizing.encode", slow)
    taken: list[Tokenized] = []
    pump = tokenizing.feeding(lambda timeout: True, taken.append)
    tokenizing.in_turns = True
    for request in requests(6):
        tokenizing.submit(request, 7)
    pump(None)
    assert len(taken) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_a_text_that_breaks_the_tokenizer_is_answered(device: Device, workers: int) -> None:
    asked = [api.Request(0, "half a character: \ud800", 3), api.Request(1, "Hello", 3)]
    tokens, events, _ = serve(device, SPEC.check({"schedule": "serial"}), asked, tokenize_workers=workers)
    (error,) = (event for event in events if isinstance(event, api.Error))
    assert error.id == 0
    assert "can't be tokenized" in error.message
    assert len(tokens[1]) == 3


def test_the_end_does_not_wait_for_a_text_and_is_not_written_to_behind_it(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def held_up(tokenizer: Tokenizer, text: str) -> list[int]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return encode(tokenizer, text)

    monkeypatch.setattr("overlap_bench.engines.overlap.tokenizing.encode", held_up)
    workers = Tokenizing(tokenizer, 1)
    wake_fd = workers.wake_fd
    workers.submit(api.Request(0, "Hello", 3), 7)
    workers._pool.submit(done.set)
    assert begun.wait(PATIENCE_S)
    workers.stop()
    assert not go_on.is_set()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # whoever opens something next gets the same number
    try:
        assert other == wake_fd
        go_on.set()
        for thread in workers._pool._threads:
            thread.join(PATIENCE_S)
        assert not select.select([other], [], [], 0)[0]
        assert not done.is_set()
    finally:
        os.close(other)


def test_a_long_text_does_not_hold_the_scheduler_up(tokenizer: Tokenizer) -> None:
    """Another thread runs in the middle of its encoding."""
    span: list[int] = []

    def work() -> None:
        text = TEXTS[2] * 3000
        span.append(perf_counter_ns())
        encode(tokenizer, text)
        span.append(perf_counter_ns())

    thread = threading.Thread(target=work)
    thread.start()
    turns = []
    while len(span) < 2:
        turns.append(perf_counter_ns())
    thread.join()
    begun, ended = span
    quarter = (ended - begun) // 4
    assert any(begun + quarter < turn < ended - quarter for turn in turns)
