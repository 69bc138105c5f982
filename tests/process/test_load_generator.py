"""The load generator as a real process, against a real engine of known cadence behind ZeroMQ; and the
bookkeeping of a round, without either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pandas as pd
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.run import messages
from overlap_bench.harness.run.load_generator import (
    LoadError,
    LoadGenerator,
    Round,
    broken,
    digest,
    submission,
)
from overlap_bench.harness.run.records import requests_frame
from overlap_bench.harness.workload.arrivals import UNTIMED
from overlap_bench.harness.workload.check import check
from overlap_bench.harness.workload.plan import Planned, plan
from overlap_bench.harness.workload.workload import Workload
from tests.support.bench_command import PATIENCE_S

PATIENCE_MS = 1000 * PATIENCE_S


class Cadence(threading.Thread):
    """An engine that speaks the host's protocol: every `step_s` each request in flight gets a token, its own
    id; the last comes with the finish. A request with the prompt "fail" is answered with an Error, one with
    the prompt "mute" never."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], inbox: str, events: str, step_s: float
    ) -> None:
        super().__init__(daemon=True)
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(inbox)
        self.events = context.socket(zmq.PUSH)
        self.events.connect(events)
        self.step_s = step_s
        self.most_in_flight = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        decode = msgspec.msgpack.Decoder(api.ToHost).decode
        left: dict[int, tuple[api.Request, int, int]] = {}  # request, tokens left, accepted
        while not self.stopping.is_set():
            if self.inbox.poll(0 if left else 20):
                message = decode(self.inbox.recv())
                assert isinstance(message, api.Submit)
                request = message.request
                left[request.id] = request, request.max_new_tokens, time.perf_counter_ns()
                self.most_in_flight = max(self.most_in_flight, len(left))
                continue
            events: list[api.Event] = []
            for request, tokens, accepted in list(left.values()):
                events += self.step(request, tokens, accepted)
                left[request.id] = request, tokens - 1, accepted
                if tokens == 1 or request.prompt in ("fail", "mute"):
                    del left[request.id]
            if events:
                self.events.send(msgspec.msgpack.encode(events))
            time.sleep(self.step_s)

    def step(self, request: api.Request, tokens: int, accepted: int) -> list[api.Event]:
        if request.prompt == "mute":
            return []
        if request.prompt == "fail":
            return [api.Error(request.id, "no room")]
        now = time.perf_counter_ns()
        chunk = api.Chunk(request.id, [request.id], "x", [now])
        if tokens > 1:
            return [chunk]
        total = request.max_new_tokens
        return [chunk, api.Finish(request.id, "length", 1, total, accepted, accepted, accepted)]


class Bench:
    """The runner's side: a load generator, engines, and what is said between them."""

    def __init__(self, folder: Path, stall_s: float) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.folder = folder
        self.replies = self.context.socket(zmq.PULL)
        self.replies.bind(self.address("replies"))
        config = messages.LoadConfig(
            events=self.address("events"),
            inbox=self.address("load"),
            replies=self.address("replies"),
            stall_s=stall_s,
        )
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "overlap_bench.harness.run.load_generator",
                msgspec.json.encode(config).decode(),
            ]
        )
        self.inbox = self.context.socket(zmq.PUSH)
        self.inbox.connect(self.address("load"))
        self.engines: list[Cadence] = []

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def engine(self, step_s: float = 0.002) -> Cadence:
        name = f"host{len(self.engines)}"
        engine = Cadence(self.context, self.address(name), self.address("events"), step_s)
        engine.start()
        self.engines.append(engine)
        return engine

    def say(self, message: messages.RunRound) -> None:
        self.inbox.send(msgspec.msgpack.encode(message))

    def start(self, planned: list[Planned], workload: Workload, host: int = 0, round_id: int = 0) -> None:
        self.say(
            messages.RunRound(
                round_id=round_id,
                targets=[self.address(f"host{host}")],
                plan=planned,
                concurrency=workload.concurrency,
                interval_ns=workload.interval_ns,
            )
        )

    def hear(self) -> messages.FromLoad:
        assert self.replies.poll(PATIENCE_MS), "the load generator says nothing"
        return msgspec.msgpack.decode(self.replies.recv(), type=messages.FromLoad)

    def outcome(self) -> messages.RoundDone | messages.LoadFailed:
        """The end of a round, whatever was said before it."""
        while not isinstance(said := self.hear(), messages.RoundDone | messages.LoadFailed):
            pass
        return said

    def round(self, workload: Workload, host: int = 0) -> pd.DataFrame:
        """One round of a workload, as requests_frame."""
        check(workload)
        self.start(plan(workload, 0, "", 512), workload, host)
        done = self.outcome()
        assert isinstance(done, messages.RoundDone), done
        frame = requests_frame(done)
        assert done.started_ns == frame["scheduled_ns"].iloc[0]
        assert done.ended_ns == frame["finished_ns"].max()
        return frame

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for engine in self.engines:
            engine.stopping.set()
            engine.join()
        self.context.destroy(linger=0)


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(tmp_path, stall_s=getattr(request, "param", 60.0))
    try:
        ready = bench.hear()
        assert isinstance(ready, messages.LoadReady)
        assert ready.timer_slack_ns == 1
        yield bench
    finally:
        bench.close()


def lag_ms(frame: pd.DataFrame) -> pd.Series:
    return (frame["sent_ns"] - frame["scheduled_ns"]) / 1e6


def test_absolute_schedule_and_everything_that_is_recorded(bench: Bench) -> None:
    bench.engine()
    frame = bench.round(Workload(pretok=False, num_requests=12, interval_ms=10.0, max_new_tokens=5))
    assert frame["request"].tolist() == list(range(12))
    assert frame["scheduled_ns"].diff().dropna().eq(10_000_000).all()
    assert lag_ms(frame).ge(0).all()
    order = ["scheduled_ns", "sent_ns", "submitted_ns", "accepted_ns", "tokenized_ns", "admitted_ns"]
    for before, after in zip(order[:2] + order[3:5], order[1:3] + order[4:6], strict=True):
        assert (frame[before] <= frame[after]).all()
    assert (frame["sent_ns"] <= frame["accepted_ns"]).all()
    for row in frame.itertuples():
        assert row.chunk_tokens.tolist() == [1] * 5
        assert (row.token_ns <= row.chunk_ns).all()  # one clock for both processes
        assert row.finished_ns == row.chunk_ns[-1]  # they came in one message
        assert row.digest == digest([row.request] * 5)
    assert frame["reason"].eq("length").all()
    assert frame["prompt_tokens"].eq(1).all()
    assert frame["completion_tokens"].eq(5).all()
    assert frame["error"].eq("").all()


def test_relative_schedule_counts_from_what_was_really_sent(bench: Bench) -> None:
    bench.engine()
    workload = Workload(
        pretok=False, num_requests=10, interval_ms=5.0, arrival_schedule="relative", max_new_tokens=2
    )
    frame = bench.round(workload)
    due, sent = frame["scheduled_ns"].tolist(), frame["sent_ns"].tolist()
    assert due[1:] == [before + 5_000_000 for before in sent[:-1]]
    assert all(at >= when for at, when in zip(sent, due, strict=True))


def test_closed_loop_keeps_its_places_full(bench: Bench) -> None:
    engine = bench.engine()
    frame = bench.round(
        Workload(pretok=False, num_requests=20, arrival="closed", concurrency=3, max_new_tokens=4)
    )
    assert engine.most_in_flight <= 3
    start, ends = frame["scheduled_ns"].iloc[0], sorted(frame["finished_ns"])
    assert frame["scheduled_ns"].tolist() == [start] * 3 + ends[:17]  # due when a place became free


def test_one_process_serves_rounds_of_both_arms(bench: Bench) -> None:
    bench.engine()
    bench.engine()
    workload = Workload(pretok=False, num_requests=4, arrival="burst", max_new_tokens=3)
    digests = [bench.round(workload, host)["digest"].tolist() for host in (0, 1, 0)]
    assert digests[0] == digests[1] == digests[2]


def test_what_was_planned_is_what_is_asked() -> None:
    how = {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "seed": 11, "stop": ["\n", "END"]}
    asked = submission(Planned(7, 0, [1, 2], 9, True, **how)).request
    assert asked == api.Request(7, [1, 2], 9, True, **how)


def test_an_error_ends_its_request_and_no_other(bench: Bench) -> None:
    bench.engine()
    planned = [Planned(id, UNTIMED, prompt, 3, False) for id, prompt in enumerate(["a", "fail", "b", "fail"])]
    bench.start(planned, Workload(arrival="closed", concurrency=1))
    done = bench.outcome()
    assert isinstance(done, messages.RoundDone)
    frame = requests_frame(done)
    assert frame["error"].tolist() == ["", "no room", "", "no room"]
    assert frame["reason"].tolist() == ["length", "", "length", ""]
    assert frame["completion_tokens"].tolist() == [3, -1, 3, -1]
    assert frame["finished_ns"].gt(frame["sent_ns"]).all()
    assert (
        frame["scheduled_ns"].tolist()[1:] == frame["finished_ns"].tolist()[:-1]
    )  # an error frees its place


def test_progress_is_told_twice_a_second_at_most(bench: Bench) -> None:
    bench.engine()
    workload = Workload(pretok=False, num_requests=14, interval_ms=100.0, max_new_tokens=3)
    bench.start(plan(workload, 0, "", 512), workload, round_id=5)
    told = []
    while not isinstance(said := bench.hear(), messages.RoundDone):
        told.append(said)
    assert 1 <= len(told) <= (said.ended_ns - said.started_ns) / 500e6
    for progress in told:
        assert isinstance(progress, messages.Progress)
        assert (progress.round_id, progress.total) == (5, 14)
        assert (progress.tpot_ms is not None) == (progress.finished > 0)


@pytest.mark.parametrize("bench", [0.3], indirect=True)
def test_a_silent_engine_fails_the_round(bench: Bench) -> None:
    bench.engine()
    bench.start([Planned(0, 0, "mute", 3, False)], Workload(arrival="burst"))
    failed = bench.outcome()
    assert isinstance(failed, messages.LoadFailed)
    assert failed.message == "the engine has been silent for 0.3 s; requests in flight: 1"
    assert bench.process.wait(PATIENCE_S) == 1


def test_an_engine_that_was_asked_for_nothing_is_not_silent(tmp_path: Path) -> None:
    told = {name: f"ipc://{tmp_path}/{name}" for name in ("events", "inbox", "replies")}
    generator = LoadGenerator(messages.LoadConfig(**told, stall_s=1e-6))
    try:
        round_ = Round(order(2), started_ns=0)
        generator._wait(round_, due=1, report_ns=1)
        round_.sent(1, 1, 1)
        with pytest.raises(LoadError, match="the engine has been silent"):
            generator._wait(round_, due=1, report_ns=1)
    finally:
        generator.context.destroy(linger=0)


def test_ctrl_c_is_left_to_the_runner(bench: Bench) -> None:
    bench.engine()
    os.kill(bench.process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal; this one stays
    bench.start([Planned(0, 0, "mute", 3, False)], Workload(arrival="burst"))
    assert isinstance(bench.hear(), messages.Progress)


# ---------------------------------------------------------------------------------------------------------
# The bookkeeping of a round


def order(count: int, concurrency: int | None = None, offset: int = 0) -> messages.RunRound:
    planned = [Planned(id, offset, "Hello", 2, False) for id in range(count)]
    return messages.RunRound(round_id=0, targets=[""], plan=planned, concurrency=concurrency, interval_ns=10)


def finish(id: int) -> api.Finish:
    return api.Finish(id, "length", 1, 2, 0, 0, 0)


@given(st.integers(1, 30), st.integers(1, 8), st.randoms(use_true_random=False), st.booleans())
def test_a_closed_loop_never_exceeds_its_concurrency(
    count: int, concurrency: int, random: object, fails: bool
) -> None:
    round_ = Round(order(count, concurrency, UNTIMED), started_ns=0)
    now = most = 0
    while not round_.over:
        now += 1
        due = round_.due_ns()
        if due is not None:
            assert due < now
            round_.sent(due, now, now)
        else:
            id = random.choice(sorted(round_.in_flight))  # type: ignore[attr-defined]
            round_.arrived(now, [api.Error(id, "no room") if fails else finish(id)])
        most = max(most, len(round_.in_flight))
    assert most == min(count, concurrency)
    assert [exchange.request for exchange in round_.exchanges] == list(range(count))


def test_an_event_for_nothing_in_flight_is_an_engines_mistake() -> None:
    round_ = Round(order(2), started_ns=0)
    with pytest.raises(LoadError, match="request 0 is not in flight"):
        round_.arrived(5, [finish(0)])
    round_.sent(0, 1, 2)
    round_.arrived(5, [finish(0)])
    with pytest.raises(LoadError, match="request 0 is not in flight"):
        round_.arrived(6, [api.Chunk(0, [1], "", [6])])


def test_times_that_an_endpoint_knows_better_replace_those_of_the_message() -> None:
    """It stamps its own send, and the kernel the arrival of a chunk; the message of either comes later."""
    round_ = Round(order(1), started_ns=0)
    round_.sent(0, 1, 2)
    round_.arrived(50, [api.Chunk(0, [7], "x", [], arrived_ns=20, lag_ns=5)])
    round_.arrived(60, [msgspec.structs.replace(finish(0), sent_ns=10, submitted_ns=11, arrived_ns=30)])
    (exchange,) = round_.exchanges
    assert (exchange.scheduled_ns, exchange.sent_ns, exchange.submitted_ns) == (0, 10, 11)
    assert (exchange.chunk_ns, exchange.chunk_lag_ns, exchange.finished_ns) == ([20], [5], 30)


MS = 1_000_000
CHUNKS = (api.Chunk(0, [7], "x", [60 * MS]), api.Chunk(0, [8], "y", [70 * MS]))
FINISH = api.Finish(0, "length", 1, 2, 20 * MS, 30 * MS, 40 * MS)
OUT_OF_ORDER = "the engine's stamps are out of order"


def what_is_wrong(*events: api.Event) -> str:
    """With a request that was sent at 10 ms, and of which all comes at 80."""
    round_ = Round(order(1), started_ns=0)
    round_.sent(0, 10 * MS, 11 * MS)
    round_.arrived(80 * MS, events)
    return broken(round_.exchanges[0])


def test_records_of_a_request_that_can_be_are_taken() -> None:
    assert what_is_wrong(*CHUNKS, FINISH) == ""
    assert what_is_wrong(api.Chunk(0, [7, 8], "xy", []), api.Finish(0, "eos", 1, 2, -1, -1, -1)) == ""
    assert what_is_wrong(api.Error(0, "no room")) == ""


@pytest.mark.parametrize(
    ("chunk", "end", "message"),
    [
        ({}, {"completion_tokens": 3}, "the engine sent 2 tokens, but says at the end that it sent 3"),
        (
            {},
            {"tokenized_ns": 15 * MS},
            f"{OUT_OF_ORDER}: tokenized comes before accepted",
        ),
        ({}, {"accepted_ns": 5 * MS}, f"{OUT_OF_ORDER}: accepted comes before sent"),
        ({"token_ns": [90 * MS]}, {}, f"{OUT_OF_ORDER}: its end's arrival comes before token 2"),
        ({"token_ns": [70 * MS, 71 * MS]}, {}, "the engine's token_ns are not one per token"),
        (
            {},
            {"reason": "cancelled"},
            "the engine ended it as cancelled, and nobody had asked for that",
        ),
    ],
)
def test_records_of_a_request_that_can_not_be_are_its_failure(
    chunk: dict[str, object], end: dict[str, object], message: str
) -> None:
    second = msgspec.structs.replace(CHUNKS[1], **chunk)
    assert what_is_wrong(CHUNKS[0], second, msgspec.structs.replace(FINISH, **end)) == message


def test_stamps_of_some_tokens_only_are_its_failure() -> None:
    without = msgspec.structs.replace(CHUNKS[0], token_ns=[])
    assert what_is_wrong(without, CHUNKS[1], FINISH) == "the engine's token_ns are not one per token"


def test_what_a_round_that_was_given_up_left_behind_is_in_no_later_round(tmp_path: Path) -> None:
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("events", "inbox", "replies", "host")}
    told = {name: addresses[name] for name in ("events", "inbox", "replies")}
    generator = LoadGenerator(messages.LoadConfig(**told, stall_s=PATIENCE_MS / 1e3))
    engine = Cadence(generator.context, addresses["host"], addresses["events"], 0.001)
    try:
        with generator.context.socket(zmq.PUSH) as late:
            late.connect(addresses["events"])
            late.send(msgspec.msgpack.encode([api.Chunk(99, [1], "", [6])]))
            assert generator.events.poll(PATIENCE_MS)
        engine.start()
        asked = msgspec.structs.replace(order(3), targets=[addresses["host"]])
        round_ = generator.run(asked)
        assert round_ is not None
        assert [len(exchange.chunk_ns) for exchange in round_.exchanges] == [2, 2, 2]
    finally:
        engine.stopping.set()
        engine.join()
        generator.context.destroy(linger=0)
