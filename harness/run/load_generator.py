"""The load generator, a process of its own:
`python -m overlap_bench.harness.run.load_generator CONFIG` (a LoadConfig as JSON).

It sends on time and stamps what comes back, beside an engine that would like every core. So it is one
thread that sleeps until the next due time or the next event, asks the kernel for exact timers and a short
scheduler slice, and leaves everything that can wait (digests, tables) until the round is over. It is not
pinned: beside an engine that works on that core, a pinned one is late by milliseconds.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import traceback
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns

import msgspec
import numpy as np
import zmq

from overlap_bench.engines import api
from overlap_bench.engines.processes import die_with_parent
from overlap_bench.engines.shortages import shortage
from overlap_bench.engines.timers import ask_for_exact_timers, ask_for_short_slice
from overlap_bench.engines.tracing import Ranges, name_thread, open_ranges
from overlap_bench.harness.metrics import digests
from overlap_bench.harness.run import messages
from overlap_bench.harness.workload.arrivals import UNTIMED
from overlap_bench.harness.workload.plan import Planned

LEAD_NS = 5_000_000  # from the round's set-up to its start, so that the first request is not late
# A thread that sleeps right after it ran owes the others CPU time: woken before that is paid off, it does not
# run before the next tick, up to 4 ms later. So the wait for what is due this soon is a spin.
SPIN_NS = 200_000
PROGRESS_NS = 500_000_000
SEND, ARRIVE = 0, 1  # NVTX ranges
STAMPS_NS = 100_000  # two stamps of one clock may be out of order by this: one may have been float seconds
CONNECT_MS = 10_000  # a host that is ready answers at once; a dead one never


class LoadError(Exception):
    """The load cannot go on; the message is one line for the person who asked."""


# ---------------------------------------------------------------------------------------------------------
# One round, without sockets and without a clock


@dataclass(slots=True)
class Exchange:
    request: int
    scheduled_ns: int
    sent_ns: int
    submitted_ns: int
    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_lag_ns: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of an engine that gives no token ids
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    misaligned: bool = False  # a chunk has stamps, and those before it do not have one per token
    finished_ns: int = -1
    finish: api.Finish | None = None
    error: str = ""


class Round:
    """What is due, what is in flight, what came back. All times are given to it."""

    def __init__(self, order: messages.RunRound, started_ns: int) -> None:
        self.order = order
        self.started_ns = started_ns
        self.exchanges: list[Exchange] = []  # as sent
        self.in_flight: dict[int, Exchange] = {}
        self.free_since = deque(
            [started_ns] * (order.concurrency or 0)
        )  # closed loop: when each free place became free
        self.heard_ns = started_ns  # silence counts from here: last message, or a send with none in flight
        self._tpots: list[float] = []  # ms, sorted

    @property
    def over(self) -> bool:
        return len(self.exchanges) == len(self.order.plan) and not self.in_flight

    def due_ns(self) -> int | None:
        """When the next request is due; None: not before an event, or never again."""
        if len(self.exchanges) == len(self.order.plan):
            return None
        offset = self.order.plan[len(self.exchanges)].offset_ns
        if offset != UNTIMED:
            return self.started_ns + offset
        if self.order.concurrency is not None:
            return self.free_since[0] if self.free_since else None
        return self.exchanges[-1].sent_ns + self.order.interval_ns

    def sent(self, scheduled_ns: int, sent_ns: int, submitted_ns: int) -> None:
        request = self.order.plan[len(self.exchanges)].id
        exchange = Exchange(request, scheduled_ns, sent_ns, submitted_ns)
        if not self.in_flight:
            self.heard_ns = sent_ns  # silence so far was nobody's fault
        self.exchanges.append(exchange)
        self.in_flight[request] = exchange
        if self.order.concurrency is not None:
            self.free_since.popleft()

    def arrived(self, stamp_ns: int, events: Sequence[api.Event]) -> None:
        """A message of events arrived. LoadError for an event of a request that is not in flight."""
        self.heard_ns = stamp_ns
        for event in events:
            exchange = self.in_flight.get(event.id)
            if exchange is None:
                raise LoadError(f"the engine sent {event!r}, and request {event.id} is not in flight")
            match event:
                case api.Chunk():
                    exchange.chunk_ns.append(stamp_ns if event.arrived_ns < 0 else event.arrived_ns)
                    exchange.chunk_lag_ns.append(event.lag_ns)
                    if event.tokens is None:
                        if event.token_ns and len(exchange.token_ns) != len(exchange.token_ids):
                            exchange.misaligned = True
                        exchange.chunk_tokens.append(len(event.token_ids))
                        exchange.token_ids += event.token_ids
                    else:
                        exchange.chunk_tokens.append(event.tokens)
                        exchange.texts.append(event.text)
                    exchange.token_ns += event.token_ns
                case api.Finish():
                    exchange.finish = event
                    if event.sent_ns >= 0:
                        exchange.sent_ns, exchange.submitted_ns = event.sent_ns, event.submitted_ns
                    self._end(exchange, stamp_ns if event.arrived_ns < 0 else event.arrived_ns)
                    self._note_tpot(exchange, event.completion_tokens - 1)
                case api.Error():
                    exchange.error = event.message
                    self._end(exchange, stamp_ns)

    def progress(self) -> messages.Progress:
        return messages.Progress(
            finished=len(self.exchanges) - len(self.in_flight),
            total=len(self.order.plan),
            tpot_ms=self._tpots[len(self._tpots) // 2] if self._tpots else None,
        )

    def _end(self, exchange: Exchange, stamp_ns: int) -> None:
        del self.in_flight[exchange.request]
        exchange.finished_ns = stamp_ns
        if self.order.concurrency is not None:
            self.free_since.append(stamp_ns)

    def _note_tpot(self, exchange: Exchange, gaps: int) -> None:
        """For the progress line only; metrics/block.py says what TPOT is."""
        if gaps > 0 and exchange.chunk_ns:
            insort(self._tpots, (exchange.chunk_ns[-1] - exchange.chunk_ns[0]) / gaps / 1e6)


def done(round_: Round) -> messages.RoundDone:
    exchanges = round_.exchanges
    return messages.RoundDone(
        started_ns=round_.started_ns,
        ended_ns=max(exchange.finished_ns for exchange in exchanges),
        data=messages.RequestTable(
            rows=np.array([_row(exchange) for exchange in exchanges], dtype=np.int64).tobytes(),
            chunk_ns=_flat([exchange.chunk_ns for exchange in exchanges]),
            chunk_tokens=_flat([exchange.chunk_tokens for exchange in exchanges]),
            chunk_lag_ns=_flat([exchange.chunk_lag_ns for exchange in exchanges]),
            token_ns=_flat([exchange.token_ns for exchange in exchanges]),
            token_ids=_flat([exchange.token_ids for exchange in exchanges]),
            reasons=[exchange.finish.reason if exchange.finish else "" for exchange in exchanges],
            digests=[
                digests.of_text(exchange.texts) if exchange.texts else digests.of_tokens(exchange.token_ids)
                for exchange in exchanges
            ],
            errors=[exchange.error or broken(exchange) for exchange in exchanges],
        ),
    )


def broken(exchange: Exchange) -> str:
    """What is impossible in the records of a request that ended, "" where nothing is. Metrics would be made
    of it; so such a request counts as failed, with this as its cause. An engine that is itself a client only
    passes on what a server says, which may count tokens that it does not send: no more is checked."""
    finish = exchange.finish
    if finish is None:
        return ""
    if finish.reason == "cancelled":
        return "the engine ended it as cancelled, and nobody had asked for that"
    if finish.sent_ns >= 0:
        return ""
    told = len(exchange.token_ids)
    if not exchange.texts and told != finish.completion_tokens:
        return f"the engine sent {told} tokens, but says at the end that it sent {finish.completion_tokens}"
    if exchange.misaligned or (told and len(exchange.token_ns) > told):
        return "the engine's token_ns are not one per token"
    stamps = {
        **{name.removesuffix("_ns"): getattr(finish, name) for name in api.STAMPS},
        **{f"token {number}": stamp for number, stamp in enumerate(exchange.token_ns, 1)},
    }
    known = [("sent", exchange.sent_ns), *((name, stamp) for name, stamp in stamps.items() if stamp >= 0)]
    known.append(("its end's arrival", exchange.finished_ns))
    for (first, before), (second, after) in pairwise(known):
        if after < before - STAMPS_NS:
            return f"the engine's stamps are out of order: {second} comes before {first}"
    return ""


def _row(exchange: Exchange) -> tuple[int, ...]:
    finish = exchange.finish or api.Finish(exchange.request, "", -1, -1, -1, -1, -1)
    return (
        exchange.request,
        exchange.scheduled_ns,
        exchange.sent_ns,
        exchange.submitted_ns,
        *(getattr(finish, name) for name in api.STAMPS),
        exchange.finished_ns,
        finish.prompt_tokens,
        finish.completion_tokens,
        len(exchange.chunk_ns),
        len(exchange.token_ns),
        len(exchange.token_ids),
    )


def _flat(lists: list[list[int]]) -> bytes:
    return np.array([value for values in lists for value in values], dtype=np.int64).tobytes()


# ---------------------------------------------------------------------------------------------------------
# The process


class LoadGenerator:
    """Joins rounds to sockets and to the clock. One for a whole run."""

    def __init__(self, config: messages.LoadConfig) -> None:
        self.config = config
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.replies = self.context.socket(zmq.PUSH)
        self.replies.sndhwm = 0  # never block on the runner
        self.replies.connect(config.replies)
        self.events = self._bound(config.events)
        self.inbox = self._bound(config.inbox)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_command = msgspec.msgpack.Decoder(messages.RunRound).decode
        self._decode_events = msgspec.msgpack.Decoder(list[api.Event]).decode

    def _bound(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.rcvhwm = 0  # an engine must never be held up by its client
        socket.bind(address)
        return socket

    def say(self, message: messages.FromLoad) -> None:
        self.replies.send(self._encode(message))

    def serve(self) -> None:
        while True:
            self.say(done(self.run(self._decode_command(self.inbox.recv()))))

    def run(self, order: messages.RunRound) -> Round:
        """One round, to its end. LoadError for an engine that is gone or silent."""
        submissions = [self._encode(submission(planned)) for planned in order.plan]
        share = -(-len(order.plan) // len(order.targets))
        gc.collect()  # now: one of the oldest generation takes milliseconds
        with ExitStack() as stack:
            targets = [stack.enter_context(self._connected(each)) for each in order.targets]
            while self._received() is not None:
                pass  # what a round that was given up left behind
            round_ = Round(order, perf_counter_ns() + LEAD_NS)
            waiting: deque[tuple[int, bytes]] = deque()  # messages that were stamped and not yet looked into
            report_ns = round_.started_ns + PROGRESS_NS
            while not round_.over:
                while (message := self._received()) is not None:
                    waiting.append((perf_counter_ns(), message))
                due = round_.due_ns()
                if due is not None and due <= perf_counter_ns():
                    number = len(round_.exchanges)
                    self._send(targets[number // share], submissions[number], due, round_)
                elif perf_counter_ns() >= report_ns:  # however much waits: it is a sign of life
                    self.say(round_.progress())
                    report_ns = perf_counter_ns() + PROGRESS_NS
                elif waiting:
                    stamp, message = waiting.popleft()  # one, then back to see what is due
                    self._take(message, stamp, round_)
                else:
                    self._wait(round_, due, report_ns)
        return round_

    def _wait(self, round_: Round, due: int | None, report_ns: int) -> None:
        """Sleep until a request is due, a message is there, or progress is to be told.

        A ZMQ_FD is edge-triggered: it turns readable once, when something happens to its socket. So a socket
        must have been read until it was empty before its descriptor is waited on, or what is left in it waits
        with us. `run` has just done so.
        """
        now = perf_counter_ns()
        silent = round_.heard_ns + round(self.config.stall_s * 1e9) if round_.in_flight else None
        if silent is not None and silent <= now:
            raise LoadError(
                f"the engine has been silent for {self.config.stall_s:g} s; "
                f"requests in flight: {len(round_.in_flight)}"
            )
        until = min(time for time in (due, silent, report_ns) if time is not None)
        if until - now >= SPIN_NS:
            select.select([self.events], [], [], (until - now) / 1e9)

    def _received(self) -> bytes | None:
        try:
            return self.events.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _send(self, target: zmq.Socket[bytes], submission: bytes, due: int, round_: Round) -> None:
        sent = perf_counter_ns()
        try:
            target.send(submission, zmq.NOBLOCK)
        except zmq.Again:
            raise LoadError("the engine's host closed its inbox in the middle of a round") from None
        round_.sent(due, sent, perf_counter_ns())

    def _take(self, message: bytes, stamp: int, round_: Round) -> None:
        try:
            events = self._decode_events(message)
        except msgspec.DecodeError as error:
            raise LoadError(f"the engine sent something other than events: {error}") from None
        round_.arrived(stamp, events)

    @contextmanager
    def _connected(self, address: str) -> Iterator[zmq.Socket[bytes]]:
        """A socket to a host's inbox whose connection is up already, so that no request waits for one."""
        with self.context.socket(zmq.PUSH) as target:
            target.linger = 0  # what an engine that went away did not take is not worth waiting for
            target.sndhwm = 0
            target.immediate = True  # writable only while there is a peer; otherwise requests pile up unseen
            target.connect(address)
            if not target.poll(CONNECT_MS, zmq.POLLOUT):
                raise LoadError(f"no engine answers at {address}")
            yield target

    def close(self) -> None:
        self.context.destroy(linger=1000)


class LoadGeneratorInRanges(LoadGenerator):
    """The same where a profiler looks on: NVTX ranges for each request that is sent, with its number, and for
    each message of events that is taken in, with the number of requests in flight."""

    def __init__(self, config: messages.LoadConfig, ranges: Ranges) -> None:
        super().__init__(config)
        self._ranges = ranges

    def _send(self, target: zmq.Socket[bytes], submission: bytes, due: int, round_: Round) -> None:
        self._ranges.push(SEND, round_.order.plan[len(round_.exchanges)].id)
        super()._send(target, submission, due, round_)
        self._ranges.pop()

    def _take(self, message: bytes, stamp: int, round_: Round) -> None:
        self._ranges.push(ARRIVE, len(round_.in_flight))
        super()._take(message, stamp, round_)
        self._ranges.pop()


def submission(planned: Planned) -> api.Submit:
    return api.Submit(
        api.Request(
            planned.id,
            planned.prompt,
            planned.max_new_tokens,
            planned.stop_on_eos,
            planned.temperature,
            planned.top_k,
            planned.top_p,
            planned.seed,
            planned.stop,
        )
    )


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to answer; it stops this process
    config = msgspec.json.decode(sys.argv[1], type=messages.LoadConfig)
    die_with_parent(config.parent)
    name_thread("load generator")
    # Before the context is made: ZeroMQ's own thread carries every message, and inherits both.
    ask_for_exact_timers()
    ask_for_short_slice()
    ranges = open_ranges("load generator", ("send", "arrive"))
    generator = LoadGenerator(config) if ranges is None else LoadGeneratorInRanges(config, ranges)
    gc.disable()  # in a round; before each, it collects
    gc.collect()
    gc.freeze()  # what was imported lives for ever: those collections need not look at it
    try:
        generator.say(messages.LoadReady())
        generator.serve()
    except Exception as error:  # the process boundary: whatever broke is told to the runner
        known = str(error) if isinstance(error, LoadError) else shortage(error)
        message = known or f"{type(error).__name__}: {error}"
        generator.say(messages.LoadFailed(message, traceback.format_exc()))
        return 1
    finally:
        generator.close()
    return 0


if __name__ == "__main__":
    os._exit(main())  # as in engines.host: everything is closed by now
