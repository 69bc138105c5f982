"""Two replicas that step together: the tokens of one, and nobody waits for one that sleeps."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from engines import api
from engines.overlap import SPEC
from engines.overlap.engine import OverlapEngine
from engines.overlap.replicas import Link, Meeting, Order
from engines.overlap.toggles import sync_ranks
from engines.overlap.toggles.sync_ranks import ATTEND, NOTHING, WORK, OnDevice, OnHost
from experiments.common.bench_command import PATIENCE_S
from experiments.common.in_process_engine import Collected, column, near_ties, serve, some_requests
from tests.engine.conftest import CHAOS_SEED

SERIAL = {"schedule": "serial", "d2h": "event"}
OVERLAP = {"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on", "tables": "dirty-rows"}


def two_replicas(settings: dict[str, str], choice: str) -> dict[str, str]:
    return SPEC.check({"launch": "inline"} | settings | {"replicas": "2", "sync-ranks": choice})


# -- the meeting ----------------------------------------------------------------------------------------


class Words:
    """An agreement of two threads."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._barrier = threading.Barrier(2, timeout=patience_s)
        self._said = [NOTHING, NOTHING]

    def of(self, rank: int) -> Words.One:
        return Words.One(self, rank)

    class One:
        def __init__(self, words: Words, rank: int) -> None:
            self._words, self._rank = words, rank

        def agree(self, word: int) -> int:
            self._words._said[self._rank] = word
            self._words._barrier.wait()
            largest = max(self._words._said)
            self._words._barrier.wait()
            return largest


class Second:
    """The second replica on a thread of its own, which has a step to run while `works`; `steps` are those
    that it took part in, and `obeyed` what it was told to do."""

    def __init__(self, words: Words, link: Link) -> None:
        self.works = self.over = False
        self.steps, self.obeyed = 0, list[str]()
        self.meeting = Meeting(words.of(1), link, self.obeyed.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.over:
            if self.meeting.asleep:
                self.meeting.serve()
            self.steps += self.meeting.goes_on(self.works)

    def end(self) -> None:
        self.over = True
        self._thread.join(PATIENCE_S)


@contextmanager
def met(patience_s: float = PATIENCE_S) -> Iterator[tuple[Meeting, Second]]:
    words, (mine, theirs) = Words(patience_s), socket.socketpair()
    second = Second(words, Link(theirs))
    yield Meeting(words.of(0), Link(mine), lambda order: None), second
    second.end()
    mine.close()
    theirs.close()


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        pass


def test_one_that_has_nothing_to_run_takes_part_in_each_step_of_the_other_and_sleeps_with_it() -> None:
    with met() as (first, second):
        for number in range(1, 4):
            assert [first.goes_on(work) for work in (True, True, False)] == [True, True, False]
            until(lambda: second.meeting.asleep)
            assert second.steps == 2 * number
            assert first.asleep
            assert not first.goes_on(False)  # and nobody is asked


def test_one_that_sleeps_is_woken_by_the_other() -> None:
    with met() as (first, second):
        second.works = True
        until(lambda: first.goes_on(False))
        assert first.goes_on(False)
        second.works = False
        until(lambda: not first.goes_on(False))
        until(lambda: second.meeting.asleep)


def test_without_the_knock_one_waits_for_one_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "knock", lambda self: None)
    with met(patience_s=0.2) as (first, second):
        with pytest.raises(threading.BrokenBarrierError):
            first.goes_on(True)
        assert second.meeting.asleep


def test_a_knock_that_came_after_both_had_woken_wakes_nobody_later() -> None:
    words, (mine, theirs) = Words(), socket.socketpair()
    both = [Meeting(words.of(rank), Link(end), lambda order: None) for rank, end in enumerate((mine, theirs))]
    for work in (True, False):
        said = [threading.Thread(target=meeting.goes_on, args=(work,)) for meeting in both]
        for each in said:
            each.start()
        for each in said:
            each.join(PATIENCE_S)
    assert [meeting.asleep for meeting in both] == [True, True]
    assert not any(meeting.goes_on(False) for meeting in both)
    mine.close()
    theirs.close()


def test_an_order_is_carried_out_while_both_sleep_between_two_steps_and_by_one_that_has_just_woken() -> None:
    with met() as (first, second):
        first.ask("asleep")
        assert second.obeyed == ["asleep"]
        assert first.goes_on(True)
        first.ask("awake")
        first.ask("again")
        assert second.obeyed == ["asleep", "awake", "again"]
        assert [first.goes_on(True), first.goes_on(False)] == [True, False]
        until(lambda: second.meeting.asleep)
        second.works = True
        until(lambda: not second.meeting.asleep)  # it waits for the first one's word
        first.ask("woken")
        assert second.obeyed[3:] == ["woken"]
        assert first.goes_on(False)
        second.works = False
        until(lambda: not first.goes_on(False))


def test_an_order_that_comes_while_one_looks_whether_to_wake_is_carried_out_at_once() -> None:
    """It may sleep then until something else comes, and nothing will before the order is answered."""
    mine, theirs = socket.socketpair()
    obeyed: list[str] = []
    second = Meeting(Words().of(1), Link(theirs), obeyed.append)
    Link(mine).send(Order("late"))
    assert not second.goes_on(False)
    assert obeyed == ["late"]
    mine.close()
    theirs.close()


# -- where they agree -----------------------------------------------------------------------------------


def test_hosts_agree_on_the_largest_word(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    heard: dict[int, list[int]] = {}
    words = [(NOTHING, NOTHING), (NOTHING, WORK), (ATTEND, WORK), (NOTHING, NOTHING)]

    def say(rank: int) -> None:
        agreement = OnHost(rank, 2, str(tmp_path / "store"))
        heard[rank] = [agreement.agree(each[rank]) for each in words]

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
    assert heard[0] == heard[1] == [max(each) for each in words]


class LateDevice:
    """A device whose copies to the host come when they are waited for."""

    def __init__(self) -> None:
        self.other, self._word, self._late = NOTHING, 0, list[tuple[torch.Tensor, int]]()

    def stream(self, name: str) -> str:
        return name

    def buffer(self, name: str) -> str:
        return name

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def capture(self, program: str) -> None:
        pass

    def to_device(self, target: str, source: torch.Tensor, stream: str) -> None:
        self._word = int(source[0])

    def launch(self, program: str, *, stream: str, step: int) -> None:
        self._word = max(self._word, self.other)

    def to_host(self, target: torch.Tensor, source: str, stream: str) -> None:
        self._late.append((target, self._word))

    def record(self, stream: str) -> int:
        return len(self._late)

    def synchronize(self, event: int) -> None:
        for target, word in self._late[:event]:
            target[0] = word


def words_heard() -> list[int]:
    device = LateDevice()
    agreement = OnDevice(device)  # type: ignore[arg-type]
    heard = []
    for device.other in (WORK, NOTHING, ATTEND):
        heard.append(agreement.agree(NOTHING))
    return heard


def test_devices_agree_and_the_word_is_read_behind_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words_heard() == [WORK, NOTHING, ATTEND]
    monkeypatch.setattr(OnDevice, "wait", lambda self, copied: None)
    assert words_heard() != [WORK, NOTHING, ATTEND]


def test_time_and_words_are_counted() -> None:
    counters: Counter[str] = Counter()
    agreement = sync_ranks.choose("device", LateDevice(), 0, 2, "", counters)  # type: ignore[arg-type]
    for _ in range(3):
        agreement.agree(WORK)
    assert counters["sync_ranks_words"] == 3
    assert counters["sync_ranks_ns"] > 0


# -- engines --------------------------------------------------------------------------------------------


def uneven_requests() -> list[api.Request]:
    """The first replica's, every other one, are short."""
    return [
        msgspec.structs.replace(each, max_new_tokens=3 if each.id % 2 == 0 else 20)
        for each in some_requests(8)
    ]


@pytest.mark.parametrize(
    ("settings", "choice"), [(OVERLAP, "device"), (SERIAL, "host")], ids=["overlap-device", "serial-host"]
)
def test_two_replicas_give_the_tokens_of_transformers(device, settings, choice):
    requests = uneven_requests()
    tokens, _, record = serve(device, two_replicas(settings, choice), requests, max_batch_size=6)
    assert near_ties("tiny-gpt2", requests, tokens) == 0
    counters, dropped = record.counters, column(record, "dropped")
    assert counters["padding_steps"] > 5
    assert sum(dropped) >= counters["padding_steps"]
    assert counters["sync_ranks_words"] >= record.steps.rows


@pytest.mark.parametrize(
    ("settings", "choice"), [(OVERLAP, "host"), (SERIAL, "device")], ids=["overlap-host", "serial-device"]
)
def test_two_replicas_give_the_tokens_of_transformers_under_chaos(chaotic_device, settings, choice):
    """Each replica's streams are held back in its own way; and blocks run out."""
    requests = uneven_requests()
    tight = {"block_size": 4, "num_blocks": 1 + 24, "max_context": 96}
    settings = two_replicas(settings, choice)
    tokens, _, _ = serve(chaotic_device, settings, requests, max_batch_size=5, chaos=CHAOS_SEED, **tight)
    assert near_ties("tiny-gpt2", requests, tokens) == 0


def test_a_replica_that_is_killed_is_named(device):
    engine = OverlapEngine(api.EngineOptions(max_batch_size=4), two_replicas(OVERLAP, "host"), device=device)
    try:
        described = engine.start(Collected("ipc://@nobody-listens"))
        for request in some_requests(4):
            engine.submit(request)
        killed = described.pids["replica 1"]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(api.EngineError) as failure:
            engine.run(lambda timeout: True)
    finally:
        engine.stop()
    assert str(failure.value) == f"replica 1 (pid {killed}) died (signal 9)"
    assert failure.value.names_process


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({"replicas": "3"}, {}, "replicas=3: it is 1 or 2"),
        ({"replicas": "2", "ranks": "2"}, {}, "replicas=2 goes with ranks=1"),
        ({"replicas": "2", "schedule": "overlap", "launch": "thread"}, {}, "goes with launch=inline"),
        ({"replicas": "2"}, {"tokenize_workers": 1}, "goes with tokenize_workers=0"),
    ],
)
def test_what_replicas_can_not_be_combined_with_is_refused_before_anything_is_started(
    device, settings, options, reason
):
    engine = OverlapEngine(api.EngineOptions(**options), SPEC.check(settings), device=device)
    with pytest.raises(api.BadSetting, match=reason):
        engine.start(Collected())
