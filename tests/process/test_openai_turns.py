"""Turns of servers that know nothing of them: a real one, with all that it starts."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest

from engines import api
from engines.openai import SPEC
from experiments.common.bench_command import PATIENCE_S
from harness.metrics import slices
from harness.plan.design import Arm
from harness.run import records
from harness.run.session import Booted, RunFailed, Session
from harness.workload.plan import Planned

SERVE = (
    f"{sys.executable} -m harness serve --engine overlap --device emulated --model micro-gpt2 --port {{port}}"
)
TOKENS, REQUESTS = 48, 4
ASKED = [Planned(number, 0, "a" * (number + 1), TOKENS, False) for number in range(REQUESTS)]
LEAD = 2


def arm(name: str, **settings: str) -> Arm:
    return Arm(
        name=name,
        engine="openai",
        options=api.EngineOptions(model=""),
        toggles=SPEC.check({"cmd": SERVE, **settings}),
    )


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as found:
        yield found


def server_of(booted: Booted) -> list[psutil.Process]:
    top = psutil.Process(booted.description.pids["server"])
    return [top, *top.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, PATIENCE_S)
    assert not left


def park(session: Session, booted: list[Booted]) -> None:
    for each in booted:
        session.begin(each)
        session._ask(each, api.BeginTurns(SPEC.turn_steps, 1, str(each.baton), len(booted)), api.Begun)


def test_servers_take_turns_of_so_many_steps_and_lose_no_token(session: Session) -> None:
    booted = list(session.boot([arm("before"), arm("after", api="chat")]).values())
    for steps in (SPEC.turn_steps, 2 * SPEC.turn_steps):
        for each in booted:
            session.begin(each)
        done = session.take_turns(booted, ASKED, steps, lambda progress: None)
        assert not any(done.data.errors)
        requests = records.requests_frame(done)
        assert requests["completion_tokens"].tolist() == [TOKENS] * 2 * REQUESTS
        spans = []
        for each in booted:
            record, turns = session.collect_turns(each)
            frame, found = records.turns_frame(turns), records.steps_frame(record)
            spans += list(zip(frame["taken_ns"], frame["drained_ns"], strict=True))
            whole = slices.decode_slices(slices.of_turns(found, frame, LEAD).assign(round=0))
            assert (whole["steps"] == steps).all()
            assert (whole["batch"] == REQUESTS).all()
            assert len(whole) >= TOKENS // steps - 3  # the first and the last are of the taking in
            assert (whole["device_ns"] == -1).all()
        spans.sort()
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))


def test_all_that_a_parked_server_started_stands_still_until_turns_are_over(session: Session) -> None:
    (booted,) = session.boot([arm("before")]).values()
    park(session, [booted])
    server = server_of(booted)
    assert len(server) > 2
    assert {each.status() for each in server} == {psutil.STATUS_STOPPED}
    booted.inbox.send(msgspec.msgpack.encode(api.EndTurns()))
    deadline = time.monotonic() + PATIENCE_S
    while psutil.STATUS_STOPPED in {each.status() for each in server}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_parked_server_stops_when_it_is_told(session: Session) -> None:
    booted = list(session.boot([arm("before"), arm("after")]).values())
    park(session, booted)
    servers = [process for each in booted for process in server_of(each)]
    assert session.shut(booted) == []
    wait_until_gone(servers)


def test_a_parked_server_does_not_outlive_a_host_that_is_killed(session: Session) -> None:
    (booted,) = session.boot([arm("before")]).values()
    park(session, [booted])
    server = server_of(booted)
    os.kill(booted.children[0].pid, signal.SIGKILL)
    wait_until_gone(server)


@pytest.mark.parametrize("which", [0, 1])
def test_a_server_that_dies_among_others_that_are_parked_is_named(session: Session, which: int) -> None:
    """And not the other one, which somebody stopped: we did."""
    booted = list(session.boot([arm("before"), arm("after")]).values())
    victim = booted[which]
    long = [Planned(number, 0, "a", 400, False) for number in range(REQUESTS)]
    for each in booted:
        session.begin(each)
    threading.Timer(0.3, lambda: os.kill(victim.description.pids["server"], signal.SIGKILL)).start()
    with pytest.raises(
        RunFailed, match=rf"the server of {victim.arm.name} .pid \d+. .*killed by SIG"
    ) as caught:
        session.take_turns(booted, long, SPEC.turn_steps, lambda progress: None)
    kept = re.search(r"/tmp/bench-server-\S+\.log", str(caught.value))
    if kept is not None:
        Path(kept[0]).unlink()
