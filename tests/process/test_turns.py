"""Turns, by real hosts: one arm runs at a time, one that computes while it is parked is told of, and one that
keeps its turn, or dies in it, is named."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.baton import Turns
from overlap_bench.harness.common import processes
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import records
from overlap_bench.harness.run.session import Booted, RunFailed, Session
from overlap_bench.harness.workload.plan import Planned
from tests.support.clockwork import SUPPORT, distribution
from tests.support.places import ROOT

ASKED = [Planned(number, 0, "a", 32, False) for number in range(3)]
STEPS = 4


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turning engine, as an installed distribution, here and in the hosts."""
    distribution(tmp_path, "turning", turning="turning_engine:SPEC")
    places = (SUPPORT, ROOT / "examples" / "own_engine", tmp_path)
    for each in places:
        monkeypatch.syspath_prepend(each)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, *places))))


def arm(name: str, turn: str = "ends", patience: str = "long") -> Arm:
    toggles = {"output": "inline", "turn": turn, "patience": patience}
    return Arm(name=name, engine="turning", options=api.EngineOptions(), toggles=toggles)


def take_turns(session: Session, booted: Sequence[Booted]) -> list[tuple[api.RoundRecord, api.TurnTable]]:
    for each in booted:
        session.begin(each)
    done = session.take_turns(booted, ASKED, STEPS, lambda progress: None)
    assert not any(done.data.errors)
    return [session.collect_turns(each) for each in booted]


@pytest.mark.parametrize("arms", [2, 3])
def test_one_arm_runs_at_a_time_and_each_runs_so_many_steps(session: Session, arms: int) -> None:
    booted = list(session.boot([arm(f"arm-{number}") for number in range(arms)]).values())
    # What one set of turns leaves behind must not be the next one's baton; and the end of one and the begin
    # of the next may reach a host together.
    for number in range(12):
        spans = []
        for record, turns in take_turns(session, booted[:: -1 if number % 2 else 1]):
            frame = records.turns_frame(turns)
            assert record.steps.rows == 32
            found = slices.of_turns(records.steps_frame(record), frame, lead=1)
            assert found["steps"].tolist() == [STEPS] * 8
            spans += list(zip(frame["taken_ns"], frame["drained_ns"], strict=True))
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))


def test_the_first_of_the_order_has_the_first_turn(session: Session) -> None:
    booted = session.boot([arm("before"), arm("after")])
    for names in (("before", "after"), ("after", "before")):
        first, second = take_turns(session, [booted[name] for name in names])
        assert records.turns_frame(first[1])["taken_ns"][0] < records.turns_frame(second[1])["taken_ns"][0]


def test_an_arm_that_computes_while_it_is_parked_is_told_from_one_that_sleeps(session: Session) -> None:
    booted = list(session.boot([arm("sleeps"), arm("computes", "computes")]).values())
    busy = [
        slices.busy_while_parked(
            slices.of_turns(records.steps_frame(record), records.turns_frame(turns), lead=1)
        )
        for record, turns in take_turns(session, booted)
    ]
    assert busy[1] > 2 * busy[0]


def test_an_arm_that_keeps_its_turn_ends_the_run_by_name(session: Session) -> None:
    booted = list(session.boot([arm("before", patience="short"), arm("after", "hangs")]).values())
    with pytest.raises(RunFailed, match=r"the engine of after hangs: it has not ended its turn in \S+ s$"):
        take_turns(session, booted)


def turns_of_one(folder: Path, order: api.BeginTurns, **delay: Any) -> tuple[Turns, int]:
    """Turns of a host whose baton comes back to itself, and the end by which it is given that."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    return Turns(msgspec.structs.replace(order, next=str(fifo)), end, [os.getpid()], **delay), end


def test_an_arm_waits_longer_where_more_others_have_their_turns(tmp_path: Path) -> None:
    arms, longest_s = 32, 0.4
    turns, _ = turns_of_one(tmp_path, api.BeginTurns(STEPS, 1, "", arms))
    turns._longest_ns = round(longest_s * 1e9)
    assert turns.patience_s > 1.5 * (arms - 1) * longest_s


def test_an_arm_that_dies_in_its_turn_or_while_it_is_parked_is_named(session: Session) -> None:
    booted = list(session.boot([arm("before"), arm("after", "hangs")]).values())
    victim = booted[0].children[0].pid
    threading.Timer(0.2, lambda: os.kill(victim, signal.SIGKILL)).start()
    with pytest.raises(RunFailed, match=rf"engine host of before .pid {victim}. was killed by SIGKILL"):
        take_turns(session, booted)


def test_engines_that_are_parked_stop_when_they_are_told(session: Session) -> None:
    booted = list(session.boot([arm("before"), arm("after")]).values())
    for each in booted:
        session.begin(each)
        session._ask(each, api.BeginTurns(STEPS, 1, str(each.baton), 2), api.Begun)
    assert session.shut(booted) == []


def test_a_baton_that_finds_nobody_with_work_is_dropped(tmp_path: Path) -> None:
    """Else idle engines would hand it to each other for as long as they are asked for nothing else."""
    fifos = [tmp_path / "one", tmp_path / "two"]
    for each in fifos:
        os.mkfifo(each)
    ends = [os.open(each, os.O_RDWR | os.O_NONBLOCK) for each in fifos]
    turns = [
        Turns(api.BeginTurns(STEPS, 0, str(fifos[1 - number]), 2), ends[number], [os.getpid()])
        for number in range(2)
    ]
    os.write(ends[0], bytes(1))
    for each in turns:
        assert each.take()
        each.between_steps(api.Engine(), idle=True)
    assert not turns[0].take()
    with pytest.raises(BlockingIOError):
        turns[1].take()


def test_an_engine_is_parked_once_it_has_all_its_requests(tmp_path: Path) -> None:
    """What it does to get ready, and to take them in, happens beside nobody's turn."""
    turns, end = turns_of_one(tmp_path, api.BeginTurns(STEPS, 2, "", 1))
    time.sleep(0.05)  # of getting ready
    assert not turns.count_request()
    complete_ns = perf_counter_ns()
    assert turns.count_request()
    os.write(end, bytes(1))
    turns.take()
    turns.between_steps(api.Engine(), idle=True)
    (parked_ns,) = records.turns_frame(turns.table())["parked_ns"]
    assert parked_ns <= perf_counter_ns() - complete_ns


def test_each_turn_has_the_delay_that_it_was_given_and_says_what_it_took(tmp_path: Path) -> None:
    put: list[tuple[str, int]] = []

    def delay(phase: str, ns: int) -> int:
        put.append((phase, ns))
        return 7 * len(put)

    order = api.BeginTurns(1, 0, "", 1, delays=[("", 0), ("schedule", 500)])
    turns, end = turns_of_one(tmp_path, order, delay=delay)
    os.write(end, bytes(1))
    for _ in range(3):
        assert turns.take()
        turns.between_steps(api.Engine(), idle=False)
    taken = put[::2]  # between them each is taken back
    assert taken == [("", 0), ("schedule", 500), ("", 0)]
    assert records.turns_frame(turns.table())["delayed_ns"].tolist() == [14, 28, 42]


@pytest.fixture
def heard() -> Iterator[None]:
    """A Ctrl-C is: a shell starts in the background what is to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_while_an_arm_is_shut_ends_the_run_once_the_arm_is_gone(
    session: Session, monkeypatch: pytest.MonkeyPatch, heard: None
) -> None:
    """Early, as it is asked to stop, and late, as it is killed: neither may be lost, nor leave half of it."""
    real_end, real_signal = processes.end, processes._signal

    def interrupted(*given: Any) -> list[processes.Child]:
        signal.raise_signal(signal.SIGINT)
        return real_end(*given)

    def interrupted_late(children: Sequence[processes.Child], which: signal.Signals) -> None:
        if which == signal.SIGKILL:
            signal.raise_signal(signal.SIGINT)
        real_signal(children, which)

    for name, change in (("end", interrupted), ("_signal", interrupted_late)):
        (booted,) = session.boot([arm("before")]).values()
        with monkeypatch.context() as patched:
            patched.setattr(processes, name, change)
            with pytest.raises(KeyboardInterrupt):
                session.shut([booted])
        assert not set(booted.children) & set(session._alive)
        assert all(child.popen.returncode is not None for child in booted.children)
