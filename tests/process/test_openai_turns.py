"""Turns of servers that know nothing of them: a real one, with all that it starts."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pandas as pd
import psutil
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import SPEC, engine
from overlap_bench.engines.openai.replies import Outcome, Reply
from overlap_bench.engines.openai.turns import Turning
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.plan.design import Arm
from overlap_bench.harness.run import records
from overlap_bench.harness.run.session import Booted, RunFailed, Session
from overlap_bench.harness.workload.plan import Planned
from tests.support.bench_command import PATIENCE_S, wait_until
from tests.support.clockwork import installed
from tests.support.in_process_engine import Collected
from tests.support.served import serving

SERVE = f"{sys.executable} -m tests.support.stepping_server {{port}}"
TOKENS, REQUESTS = 48, 4
ASKED = [Planned(number, 0, "b" * (number + 1), TOKENS, False) for number in range(REQUESTS)]
LEAD = 2


def arm(name: str, **settings: str) -> Arm:
    return Arm(
        name=name,
        engine="openai",
        options=api.EngineOptions(model=""),
        toggles=SPEC.check({"cmd": SERVE} | settings),
    )


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


def test_all_that_a_parked_server_started_stands_still_until_turns_are_over_or_it_is_told_to_stop(
    session: Session,
) -> None:
    booted = list(session.boot([arm("before"), arm("after")]).values())
    park(session, booted)
    first, second = map(server_of, booted)
    assert len(first) > 2
    assert {each.status() for each in (*first, *second)} == {psutil.STATUS_STOPPED}
    booted[0].inbox.send(msgspec.msgpack.encode(api.EndTurns()))
    wait_until(lambda: psutil.STATUS_STOPPED not in {each.status() for each in first})
    assert {each.status() for each in second} == {psutil.STATUS_STOPPED}
    assert session.shut(booted) == []
    wait_until_gone([*first, *second])


def test_a_parked_server_can_clean_up_when_its_run_is_broken_off(tmp_path: Path) -> None:
    """It is asked to end, and goes on to do so, before its host is killed: the kernel hangs up on what is
    stopped and has lost its parent."""
    script, ended = tmp_path / "serve.sh", tmp_path / "ended"
    script.write_text(f"trap 'touch {ended}; exit' TERM\n{SERVE.replace('{port}', '$1')} & wait\n")
    with Session() as session:
        (booted,) = session.boot([arm("before", cmd=f"sh {script} {{port}}")]).values()
        park(session, [booted])
        server = server_of(booted)
    assert ended.exists()
    wait_until_gone(server)


def test_a_parked_server_does_not_outlive_a_host_that_is_killed(session: Session) -> None:
    (booted,) = session.boot([arm("before")]).values()
    park(session, [booted])
    server = server_of(booted)
    os.kill(booted.children[0].pid, signal.SIGKILL)
    wait_until_gone(server)


@pytest.mark.parametrize(("tokens", "steps"), [(2 * TOKENS, 2 * SPEC.turn_steps), (32, SPEC.turn_steps)])
def test_a_server_that_goes_on_elsewhere_while_it_is_stopped_is_told(
    session: Session, tmp_path: Path, tokens: int, steps: int
) -> None:
    """Its steps would seem to take no time."""
    with serving(installed(tmp_path), tmp_path, "--ttft-ms", "1", "--itl-ms", "10") as there:
        forward = f"{sys.executable} -m tests.support.forward {{port}} {there.address[1]}"
        arms = [arm("before", cmd=f"{SERVE} 0.01"), arm("after", cmd=forward)]
        booted = list(session.boot(arms).values())
        for each in booted:
            session.begin(each)
        asked = [Planned(number, 0, "a", tokens, False) for number in range(REQUESTS)]
        session.take_turns(booted, asked, steps, lambda progress: None)
        session.collect_turns(booted[0])
        with pytest.raises(RunFailed, match=r"after.*went on while it was stopped.*--interleaved-rounds 0"):
            session.collect_turns(booted[1])


def test_a_server_that_dies_among_others_that_are_parked_is_named(session: Session) -> None:
    """And not the other one, which somebody stopped: we did."""
    booted = list(session.boot([arm("before"), arm("after")]).values())
    victim = booted[1]
    long = [Planned(number, 0, "a", 400, False) for number in range(REQUESTS)]
    for each in booted:
        session.begin(each)
    threading.Timer(0.3, lambda: os.kill(victim.description.pids["server"], signal.SIGKILL)).start()
    with pytest.raises(
        RunFailed, match=rf"the server of {victim.arm.name} .pid \d+. .*killed by SIG"
    ) as caught:
        session.take_turns(booted, long, SPEC.turn_steps, lambda progress: None)
    kept = re.search(r"/tmp/bench-server-\S+\.log", str(caught.value))
    assert "loading the model" in Path(kept[0]).read_text()
    Path(kept[0]).unlink()


# ---------------------------------------------------------------------------------------------------------
# What is made of what came


@pytest.fixture
def turning() -> Iterator[Turning]:
    process = subprocess.Popen(["sleep", "60"])
    yield Turning(process.pid)
    process.kill()
    process.wait()


EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


def give(turning: Turning, replies: Sequence[Reply], piece: bytes = EVENT) -> None:
    """One more chunk of each reply comes."""
    for each in replies:
        each.pieces.append(piece)
        each.arrived_ns.append(time.perf_counter_ns())
        each.read_ns.append(each.arrived_ns[-1])
    turning.read(replies, [])


def finish(turning: Turning, replies: Sequence[Reply], tokens: int | None = None, sum_of: int = 0) -> None:
    """Each reply has ended; `tokens` of each chunk."""
    turning.read([], replies)
    for each in replies:
        events = b"".join(piece for piece in each.pieces if not piece.startswith(b":")).split(b"\n\n")[:-1]
        places = [number for number, event in enumerate(events) if event == EVENT.strip()]
        arrivals = [at for at, piece in zip(each.arrived_ns, each.pieces, strict=True) if piece == EVENT]
        chunks: list[api.Event] = [
            api.Chunk(each.request, [], "a", [], tokens=tokens or 1, arrived_ns=at) for at in arrivals
        ]
        end = api.Finish(each.request, "length", 1, sum_of or len(chunks), 0, -1, -1)
        turning.finished(
            [chunk for chunk in chunks if isinstance(chunk, api.Chunk)],
            Outcome([*chunks, end], "usage", places=tuple(places)),
        )


def steps_of(turning: Turning) -> pd.DataFrame:
    return records.steps_frame(api.RoundRecord(steps=turning.table()))


@pytest.mark.parametrize("early", [0, 1, 2])
def test_what_came_before_a_turn_began_is_its_beginning_and_voids_it_where_it_is_two_steps(
    turning: Turning, early: int
) -> None:
    replies = [Reply(number, 0) for number in range(3)]
    for _ in range(3):
        turning.begin_step(replies)
        give(turning, replies)
        assert turning.step_is_over
    turning.park()
    for _ in range(early):
        give(turning, replies)
    for number in range(3):
        went_on = turning.begin_step(replies)
        assert went_on == (number == 0)
        if number >= early:
            assert not turning.step_is_over
            give(turning, replies)
        assert turning.step_is_over
    finish(turning, replies)
    found = steps_of(turning)
    assert found["step"].tolist() == ([0, 1, 2] if early == 2 else [*range(6)])
    assert (found["batch"] == 3).all()
    assert found["append.start"].is_monotonic_increasing


def test_comments_between_two_events_are_no_steps(turning: Turning) -> None:
    replies = [Reply(number, 0) for number in range(2)]
    for _ in range(4):
        turning.begin_step(replies)
        give(turning, replies[:1], b": still there\n\n")
        assert not turning.step_is_over
        give(turning, replies)
        assert turning.step_is_over
    finish(turning, replies)
    assert steps_of(turning)["batch"].tolist() == [2] * 4


@pytest.mark.parametrize("pieces", [[ROLE], [ROLE[:40], ROLE[40:]]], ids=["whole", "in two pieces"])
def test_the_role_that_a_chat_begins_with_is_no_chunk_of_a_step(
    turning: Turning, pieces: list[bytes]
) -> None:
    """Else the request whose role comes last, behind others' tokens, would be a step ahead of them."""
    replies = [Reply(number, 0) for number in range(3)]
    turning.begin_step(replies)
    for each in replies:
        assert not turning.step_is_over
        for piece in pieces:
            give(turning, [each], piece)
        give(turning, [each])
    assert turning.step_is_over
    for _ in range(4):
        turning.begin_step(replies)
        give(turning, replies)
        assert turning.step_is_over
    finish(turning, replies)
    found = steps_of(turning)
    assert found["batch"].tolist() == [3] * 5
    assert found["step"].tolist() == [*range(5)]


@pytest.mark.parametrize(("tokens", "sum_of", "kept"), [(4, 80, True), (-1, 21, True), (-1, 80, False)])
def test_steps_that_gave_nobody_knows_how_many_tokens_are_left_out(
    turning: Turning, tokens: int, sum_of: int, kept: bool
) -> None:
    """Else a chunk of four tokens would be compared with one of one."""
    replies = [Reply(number, 0) for number in range(2)]
    for _ in range(20):
        turning.begin_step(replies)
        give(turning, replies)
    finish(turning, replies, tokens, sum_of)
    found = steps_of(turning)
    assert len(found) == (20 if kept else 0)
    if kept:
        assert (found["tokens"] == 2 * max(1, tokens)).all()


def test_a_server_that_takes_its_time_in_a_turn_is_not_taken_for_dead() -> None:
    """The load generator takes an engine for dead that says nothing for a minute."""
    heard: list[Sequence[api.Event]] = []

    class Heard(Collected):
        def send(self, events: Sequence[api.Event]) -> None:
            heard.append(events)

    command = f"{sys.executable} -m tests.support.small_server {{port}}"
    built = engine.build(api.EngineOptions(model=""), SPEC.check({"cmd": command}))
    try:
        built.start(Heard())
        built.begin_turns()
        built.submit(api.Request(0, "a", 4))
        pumps = iter([True])
        built.run(lambda timeout: next(pumps, False))
    finally:
        built.stop()
    assert [] in heard
