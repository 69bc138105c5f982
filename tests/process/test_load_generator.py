"""The load generator against an engine that answers at once, behind ZeroMQ; and the bookkeeping of a round,
without either."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.metrics.digests import of_tokens
from overlap_bench.harness.run import messages
from overlap_bench.harness.run.load_generator import (
    PROGRESS_NS,
    LoadError,
    LoadGenerator,
    Round,
    broken,
    done,
    submission,
)
from overlap_bench.harness.run.records import requests_frame
from overlap_bench.harness.workload.arrivals import UNTIMED
from overlap_bench.harness.workload.plan import Planned
from tests.support.bench_command import PATIENCE_S

PATIENCE_MS = 1000 * PATIENCE_S


@dataclass
class Bench:
    """A load generator of this process, and both ends of what it is connected to."""

    generator: LoadGenerator
    host: str
    inbox: zmq.Socket[bytes]
    events: zmq.Socket[bytes]
    replies: zmq.Socket[bytes]

    def answer(self, requests: int) -> None:
        """Each request with its own id as every token, all of them in one message."""
        decode, encode = msgspec.msgpack.Decoder(api.ToHost).decode, msgspec.msgpack.encode
        for _ in range(requests):
            asked = decode(self.inbox.recv()).request
            now, count = perf_counter_ns(), asked.max_new_tokens
            tokens = [api.Chunk(asked.id, [asked.id], "x", [now]) for _ in range(count)]
            self.events.send(encode([*tokens, api.Finish(asked.id, "length", 1, count, now, now, now)]))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    events, inbox, replies, host = (f"ipc://{tmp_path}/{name}" for name in "eirh")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = context.socket(zmq.PULL), context.socket(zmq.PUSH), context.socket(zmq.PULL)
    ends[0].bind(host)
    ends[1].connect(events)
    ends[2].bind(replies)
    generator = LoadGenerator(messages.LoadConfig(events=events, inbox=inbox, replies=replies, stall_s=1e-6))
    try:
        yield Bench(generator, host, *ends)
    finally:
        generator.context.destroy(linger=0)
        context.destroy(linger=0)


def test_a_round_is_sent_when_it_is_due_and_all_that_comes_back_is_recorded(bench: Bench) -> None:
    """What a round that was given up left behind is in no later one. Progress is told twice a second."""
    bench.events.send(msgspec.msgpack.encode([api.Chunk(99, [1], "", [6])]))
    assert bench.generator.events.poll(PATIENCE_MS)
    bench.generator.config = msgspec.structs.replace(bench.generator.config, stall_s=PATIENCE_S)
    asked = [Planned(id, 100_000_000 * id, "Hello", 5, False) for id in range(12)]
    order = messages.RunRound(targets=[bench.host], plan=asked, concurrency=None, interval_ns=0)
    engine = threading.Thread(target=bench.answer, args=(len(asked),), daemon=True)
    engine.start()
    round_ = bench.generator.run(order)
    engine.join()
    frame = requests_frame(done(round_))
    assert frame["request"].tolist() == list(range(12))
    assert frame["scheduled_ns"].diff().dropna().eq(100_000_000).all()
    stamps = frame[["scheduled_ns", "sent_ns", "accepted_ns", "tokenized_ns", "admitted_ns", "finished_ns"]]
    assert (stamps.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)  # one clock for both
    for row in frame.itertuples():
        assert row.chunk_tokens.tolist() == [1] * 5
        assert row.finished_ns == row.chunk_ns[-1]  # they came in one message
        assert row.digest == of_tokens([row.request] * 5)
    ends = frame[["reason", "prompt_tokens", "completion_tokens", "error"]].drop_duplicates()
    assert ends.to_numpy().tolist() == [["length", 1, 5, ""]]
    told = []
    while bench.replies.poll(100):
        told.append(msgspec.msgpack.decode(bench.replies.recv(), type=messages.FromLoad))
    assert 1 <= len(told) <= (round_.exchanges[-1].finished_ns - round_.started_ns) / PROGRESS_NS
    assert {each.total for each in told} == {12}


def test_an_engine_that_was_asked_for_nothing_is_not_silent(bench: Bench) -> None:
    round_ = Round(order(2), started_ns=0)
    bench.generator._wait(round_, due=1, report_ns=1)
    round_.sent(1, 1, 1)
    with pytest.raises(LoadError, match="the engine has been silent for 1e-06 s; requests in flight: 1"):
        bench.generator._wait(round_, due=1, report_ns=1)


def test_what_was_planned_is_what_is_asked() -> None:
    how = {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "seed": 11, "stop": ["\n", "END"]}
    asked = submission(Planned(7, 0, [1, 2], 9, True, **how)).request
    assert asked == api.Request(7, [1, 2], 9, True, **how)


# ---------------------------------------------------------------------------------------------------------
# The bookkeeping of a round


def order(count: int, concurrency: int | None = None, offset: int = 0) -> messages.RunRound:
    planned = [Planned(id, offset, "Hello", 2, False) for id in range(count)]
    return messages.RunRound(targets=[""], plan=planned, concurrency=concurrency, interval_ns=10)


def finish(id: int) -> api.Finish:
    return api.Finish(id, "length", 1, 2, 0, 0, 0)


def test_without_times_a_request_is_due_so_long_after_the_last_was_sent_or_once_a_place_is_free() -> None:
    relative = Round(order(2, offset=UNTIMED), started_ns=5)
    relative.sent(5, 7, 8)
    assert relative.due_ns() == 7 + 10
    closed = Round(order(4, 2, UNTIMED), started_ns=5)
    for _ in range(2):
        assert closed.due_ns() == 5
        closed.sent(5, 7, 8)
    assert closed.due_ns() is None
    assert closed.progress() == messages.Progress(finished=0, total=4, tpot_ms=None)
    closed.arrived(30, [api.Error(1, "no room")])  # which frees its place, and ends no other
    closed.arrived(40, [api.Chunk(0, [0, 0], "", []), finish(0)])
    assert closed.due_ns() == 30
    assert closed.progress() == messages.Progress(finished=2, total=4, tpot_ms=0)
    assert [each.finished_ns for each in closed.exchanges] == [40, 30]


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
        ({}, {"queued_ns": 25 * MS}, f"{OUT_OF_ORDER}: queued comes before tokenized"),
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
