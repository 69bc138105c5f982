"""The gate between a host and vLLM's core: who waits for whom, and what is told."""

import select
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from overlap_bench.engines import api
from overlap_bench.engines.vllm.gate import COLLECT, FINISH, GO, Asked, Core, Gate, died
from overlap_bench.engines.vllm.steps import Steps
from tests.support.bench_command import PATIENCE_S
from tests.unit.engines.test_vllm_steps import scheduled


class Stepping:
    """A core, on a thread of its own while it waits."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._core = Core(self.steps)
        self._threads = ThreadPoolExecutor(1)

    def next_step(self, requests: int = 0, outputs: int = 0, begun: int = 0) -> Future[bytes]:
        return self._threads.submit(self._core.ask, Asked(requests, outputs, begun))


@contextmanager
def opened() -> Iterator[tuple[Gate, Stepping]]:
    gate = Gate()
    core = Stepping()
    gate.open()
    yield gate, core
    gate.close()


def asked(gate: Gate) -> Asked:
    assert select.select([gate], [], [], PATIENCE_S)[0]
    return gate.hear()


def test_a_core_that_fails_to_tell_its_records_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(steps: Steps) -> api.RoundRecord:
        raise RuntimeError("dictionary changed size during iteration")

    seen = Event()
    monkeypatch.setattr(threading, "excepthook", lambda error: seen.set())
    monkeypatch.setattr(Steps, "record", failing)
    with opened() as (gate, _):
        gate._records.send_bytes(COLLECT)
        assert gate._records.poll(PATIENCE_S)  # it is closed
        with pytest.raises(api.EngineError, match="vLLM's engine core died"):
            gate.collect()
        assert seen.wait(PATIENCE_S)


def test_outside_of_turns_the_core_goes_by() -> None:
    with opened() as (gate, core):
        assert [core.next_step().result(PATIENCE_S) for _ in range(3)] == [GO] * 3
        assert not select.select([gate], [], [], 0)[0]


def test_in_turns_a_step_waits_for_a_word_and_says_what_was_done_before() -> None:
    with opened() as (gate, core):
        gate.begin()
        for number, word in enumerate((GO, FINISH, GO)):
            step = core.next_step(outputs=4 * number, begun=number)
            assert asked(gate) == Asked(0, 4 * number, number)
            assert not step.done()
            gate.let(word)
            assert gate.asked is None
            assert step.result(PATIENCE_S) == word


@pytest.mark.parametrize("heard", [False, True])
def test_a_core_that_asks_with_a_step_in_flight_is_not_left_waiting_once_requests_have_ended(
    heard: bool,
) -> None:
    """One step ahead: of the last request a step is in flight, and vLLM schedules once more."""
    with opened() as (gate, core):
        gate.begin()
        core.steps.made(scheduled(old={"a": 1}), 1, 2)
        step = core.next_step(begun=1)
        assert select.select([gate], [], [], PATIENCE_S)[0]
        if heard:
            gate.hear()
        finishing = ThreadPoolExecutor(1).submit(gate.finish)
        assert step.result(PATIENCE_S) == FINISH
        core.steps.finished(0, 3, 4)
        finishing.result(PATIENCE_S)
        assert gate.asked is None


@pytest.mark.parametrize("heard", [False, True])
def test_when_turns_end_the_core_goes_on_and_the_next_ones_hear_what_it_asks_then(heard: bool) -> None:
    with opened() as (gate, core):
        gate.begin()
        gate.end()  # it is idle
        assert core.next_step().result(PATIENCE_S) == GO
        gate.begin()
        step = core.next_step(outputs=1)
        assert select.select([gate], [], [], PATIENCE_S)[0]
        if heard:
            gate.hear()
        gate.end()
        assert gate.asked is None
        assert step.result(PATIENCE_S) == GO
        assert core.next_step().result(PATIENCE_S) == GO
        gate.begin()
        step = core.next_step(outputs=7)
        assert asked(gate) == Asked(0, 7, 0)
        gate.let(GO)
        assert step.result(PATIENCE_S) == GO


def test_records_are_the_cores() -> None:
    with opened() as (gate, core):
        core.steps.made(scheduled(new=("a",)), 1, 2)
        assert gate.begun() == 1
        core.steps.finished(0, 3, 4, outputs=5)
        assert gate.begun() == 0
        record, outputs = gate.collect()
        assert outputs == [5]
        assert record.steps.rows == 1
        assert record == core.steps.record()
        gate.clear()
        assert gate.collect() == (Steps().record(), [])
        gate.delay("append", 1000)
        core.steps.delay.spend("append")
        assert gate.delay("", 0) >= 1000
        gate.begin_profile(24)
        record, _ = gate.collect()
        assert record.profile.opened_ns == -1


def test_a_core_that_is_gone_is_an_error() -> None:
    gate = Gate()
    core = Core(Steps())
    gate.open()
    core._steps.close()
    for use in (gate.hear, gate.begin, gate.end, lambda: gate.let(GO)):
        with pytest.raises(api.EngineError, match=r"^vLLM's engine core died$"):
            use()
    gate.close()


def test_a_core_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it printed counts, and not what others printed of its end."""
    printed = (
        "Traceback\noverlap_bench.engines.errors.EngineError: heap=frozen is not in force\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue\n"
        "RuntimeError: Engine core initialization failed\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda path, errors: printed)
    assert str(died()) == "vLLM's engine core died: heap=frozen is not in force"
