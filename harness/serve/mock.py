"""A server whose TTFT and ITL are known, to calibrate clients with:

    bench mock --port 0 --ttft-ms 50 --itl-ms 10

It talks as an OpenAI-compatible server does (/v1/completions and /v1/chat/completions, streaming and not) and
computes nothing. A request's first token is due one TTFT after its last byte arrived, by the kernel's own
stamp where there is one; each further token one ITL after the one before was due, not after it was sent. So
lateness never adds up.

It says how late it was itself, by a stamp just before each send: GET /lateness, since the last DELETE
/lateness. A client's error is what it measured, less the TTFT or ITL that was asked for; what of that is the
server's stands there.

One thread, one epoll and httptools' parser, for it runs beside the client that it calibrates: 1,000 streams
with 10 ms between tokens are 100,000 chunks a second, and each costs it one send and next to nothing else. An
event loop's timers are of no use here, for they count milliseconds.
"""

from __future__ import annotations

import gc
import select
import signal
import socket
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from time import perf_counter_ns, time, time_ns
from typing import Any

import httptools
import msgspec

from overlap_bench.engines import sockets
from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.timers import ask_for_exact_timers, ask_for_short_slice
from overlap_bench.harness.serve.listening import address_of, bind
from overlap_bench.harness.serve.mock_answers import (
    MODEL,
    Answer,
    Body,
    StreamOptions,
    prompt_tokens,
    refusal,
    reply,
)

MOST_TOKENS = 1 << 20  # of an answer
DEFAULT_TOKENS = 16  # where a request does not say, as in OpenAI's completions
READ_BYTES = 1 << 16
MOST_BYTES = 16 << 20  # of a connection's requests that are not answered yet
KEPT_BYTES = 1 << 10  # that one takes besides what came
MOST_UNSENT = 16 << 20  # bytes that wait for a client to read them
BACKLOG = 4096  # connections that wait to be accepted
BURST = 64  # tokens sent before sockets are looked at again
LONGEST_US = 200_000  # from here on lateness is only counted, and the worst of it kept
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Timing:
    """When tokens come, and how: chunks of 1, 2, ... `max_tokens_per_chunk` tokens in turn, each due with its
    last token."""

    ttft_ns: int
    itl_ns: int
    max_tokens_per_chunk: int = 1


def make_timing(ttft_ms: float, itl_ms: float, max_tokens_per_chunk: int) -> Timing:
    """Checked. Raises BadSetting."""
    for flag, ms in (("--ttft-ms", ttft_ms), ("--itl-ms", itl_ms)):
        if not 0 <= ms < float("inf"):
            raise BadSetting(f"{flag} must be at least 0, not {ms:g}")
    if max_tokens_per_chunk < 1:
        raise BadSetting(f"--max-tokens-per-chunk must be at least 1, not {max_tokens_per_chunk}")
    return Timing(round(ttft_ms * 1e6), round(itl_ms * 1e6), max_tokens_per_chunk)


class Lateness:
    """How late something was, in counts per microsecond: exact percentiles in constant memory."""

    def __init__(self) -> None:
        self._counts = [0] * (LONGEST_US + 1)
        self._sum_ns = self._worst_ns = 0

    def add(self, ns: int) -> None:
        self._sum_ns += ns
        if ns > self._worst_ns:
            self._worst_ns = ns
        us = ns // 1000
        self._counts[us if us < LONGEST_US else LONGEST_US] += 1

    def summary(self) -> dict[str, float]:
        """Microseconds: mean, percentiles, max."""
        total = sum(self._counts)
        found: dict[str, float] = {"count": total}
        if not total:
            return found
        found["mean"] = round(self._sum_ns / total / 1e3, 1)
        seen = list(accumulate(self._counts))  # by each microsecond
        found |= {f"p{share}": bisect_left(seen, share / 100 * total) for share in PERCENTILES}
        return found | {"max": round(self._worst_ns / 1e3, 1)}


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    path: str
    body: bytes
    arrived_ns: int
    keep_alive: bool
    size: int  # bytes that it takes


class Connection:
    """A socket and the parser of what comes in by it. Requests are answered in the order they came."""

    def __init__(self, mock: Mock, client: socket.socket) -> None:
        self.socket = client
        self.waiting: deque[Received] = deque()
        self.answer: Answer[Connection] | None = None  # the one that is being sent
        self.open = True
        self._mock = mock
        self._parser: Any = httptools.HttpRequestParser(self)
        self._unsent = bytearray()  # a client that reads slower than it is sent to
        self._last = False  # nothing comes behind what is unsent
        self._arrived_ns = 0
        self._received = 0  # bytes of the request that is being read
        self._kept = 0  # bytes of those that wait

    # What the parser calls. It swallows what is raised here, so nothing is done but to keep what came.

    def on_message_begin(self) -> None:
        self._url, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        size, self._received = self._received + KEPT_BYTES, 0
        self._kept += size
        parser = self._parser
        path = self._url.partition(b"?")[0].decode(errors="replace")
        self.waiting.append(
            Received(
                parser.get_method().decode(),
                path,
                bytes(self._body),
                self._arrived_ns,
                parser.should_keep_alive(),
                size,
            )
        )

    def read(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(READ_BYTES, sockets.STAMP_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._arrived_ns = self._mock.arrival(ancillary)
        self._received += len(data)
        if self._received + self._kept > MOST_BYTES:
            message = f"requests that are not answered yet have more than {MOST_BYTES} bytes"
            self.send(refusal(413, message))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.send(refusal(400, f"this is not HTTP/1.1: {error}"))
            self.close()
            return
        self.go_on()

    def go_on(self) -> None:
        while self.open and self.waiting and self.answer is None:
            answer = self._mock.answer(self, self.waiting[0])
            if not self.open:  # its client was gone, which the answer's first bytes showed
                return
            self.answer = answer
            if answer is None:
                self.done()

    def done(self) -> None:
        """The request at the front is answered."""
        self.answer = None
        answered = self.waiting.popleft()
        self._kept -= answered.size
        if not answered.keep_alive:
            self._last = True
            if not self._unsent:
                self.close()

    def send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            if len(self._unsent) > MOST_UNSENT:
                self.close()
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._mock.epoll.modify(self.socket, select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> None:
        """The socket takes data again."""
        unsent, self._unsent = bytes(self._unsent), bytearray()
        self._mock.epoll.modify(self.socket, select.EPOLLIN)
        self.send(unsent)
        if self._last and not self._unsent:
            self.close()

    def close(self) -> None:
        if self.open:
            self.open = False
            self._mock.forget(self)
            self.socket.close()
            self.waiting.clear()
            self.answer = self._parser = None  # no cycle is left: the collector is off


class Mock:
    """All connections, and what is due on them.

    Every stream waits equally long for its first token, and equally long for each further one. So those that
    wait for either stand in a queue in the order in which they are due, and go to its end again.
    """

    def __init__(self, timing: Timing, listener: socket.socket) -> None:
        self.epoll = select.epoll()
        self._timing = timing
        self._listener = listener
        self._connections: dict[int, Connection] = {}
        self._first: deque[Answer[Connection]] = deque()
        self._later: deque[Answer[Connection]] = deque()
        self._numbers = count()
        self._kernel_stamps = False
        self._forget_lateness()
        listener.setblocking(False)
        self.epoll.register(listener, select.EPOLLIN)

    def _forget_lateness(self) -> None:
        self._reading, self._first_tokens, self._later_tokens = Lateness(), Lateness(), Lateness()

    def serve(self) -> None:
        """For ever; a signal that raises ends it."""
        while True:
            due = self._next_due_ns()
            if due is None:
                select.select([self.epoll], [], [])
            elif (left := due - perf_counter_ns()) > 0:
                # epoll's own time limit counts milliseconds.
                select.select([self.epoll], [], [], left / 1e9)
            for descriptor, mask in self.epoll.poll(0):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif (connection := self._connections.get(descriptor)) is not None:
                    if mask & select.EPOLLOUT:
                        connection.flush()
                    if mask & ~select.EPOLLOUT and connection.open:
                        connection.read()
            self._send_due()

    def _next_due_ns(self) -> int | None:
        return min((queue[0].due_ns for queue in (self._first, self._later) if queue), default=None)

    def _send_due(self) -> None:
        """The tokens that are due by now, the longest due first; a burst at most, then come the sockets."""
        first, later, itl_ns = self._first, self._later, self._timing.itl_ns
        now = perf_counter_ns()
        for _ in range(BURST):
            if first and not (later and later[0].due_ns < first[0].due_ns):
                queue, lateness = first, self._first_tokens
            elif later:
                queue, lateness = later, self._later_tokens
            else:
                return
            answer = queue[0]
            if answer.due_ns > now:
                now = perf_counter_ns()
                if answer.due_ns > now:
                    return
            queue.popleft()
            connection = answer.connection
            if connection.answer is not answer:  # its client is gone
                continue
            data = answer.token()
            if data:
                now = perf_counter_ns()
                lateness.add(now - answer.due_ns)
                connection.send(data)
            if answer.made < answer.total:
                answer.due_ns += itl_ns
                _queue(later, answer)
            elif connection.open:
                connection.done()
                connection.go_on()

    # -- connections ---------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # none left, gone meanwhile, or no descriptor for one more
                return
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets.stamp_arrivals(client)
            self._connections[client.fileno()] = Connection(self, client)
            self.epoll.register(client, select.EPOLLIN)

    def forget(self, connection: Connection) -> None:
        self.epoll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]

    def arrival(self, ancillary: Sequence[tuple[int, int, bytes]]) -> int:
        """When what was just read arrived at this machine: the kernel's stamp, which is of the wall clock, or
        now."""
        now = perf_counter_ns()
        stamp = sockets.arrival_ns(ancillary)
        if stamp < 0:
            return now
        self._kernel_stamps = True
        arrived = min(now, now - (time_ns() - stamp))
        self._reading.add(now - arrived)
        return arrived

    # -- requests ------------------------------------------------------------------------------------------

    def answer(self, connection: Connection, received: Received) -> Answer[Connection] | None:
        """Answer a request now (None), or begin to."""
        match (received.method, received.path):
            case ("POST", "/v1/completions" | "/v1/chat/completions"):
                return self._complete(connection, received)
            case ("GET", "/v1/models"):
                entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "overlap-bench"}
                connection.send(reply(200, {"object": "list", "data": [entry]}))
            case ("GET", "/health"):
                connection.send(reply(200, {"status": "ok"}))
            case ("GET", "/lateness"):
                connection.send(reply(200, self._lateness()))
            case ("DELETE", "/lateness"):
                self._forget_lateness()
                connection.send(reply(200, {}))
            case (method, path):
                connection.send(refusal(404, f"there is no {method} {path}"))
        return None

    def _lateness(self) -> dict[str, Any]:
        return {
            "unit": "us",
            "arrival": "kernel" if self._kernel_stamps else "read",
            "reading": self._reading.summary(),
            "first_token": self._first_tokens.summary(),
            "later_tokens": self._later_tokens.summary(),
        }

    def _complete(self, connection: Connection, received: Received) -> Answer[Connection] | None:
        try:
            body = msgspec.json.decode(received.body, type=Body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            connection.send(refusal(400, str(error)))
            return None
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        total = DEFAULT_TOKENS if asked is None else asked
        if not 1 <= total <= MOST_TOKENS:
            connection.send(refusal(400, f"max_tokens must lie between 1 and {MOST_TOKENS}"))
            return None
        chat = received.path == "/v1/chat/completions"
        answer = Answer(
            connection=connection,
            name=f"{'chatcmpl' if chat else 'cmpl'}-{next(self._numbers)}",
            chat=chat,
            streamed=body.stream,
            options=body.stream_options or StreamOptions(),
            prompt_tokens=prompt_tokens(body),
            total=total,
            due_ns=received.arrived_ns + self._timing.ttft_ns,
            most=self._timing.max_tokens_per_chunk,
            created=int(time()),
        )
        if chat and body.stream:
            connection.send(answer.role())
        _queue(self._first, answer)
        return answer


def _queue(queue: deque[Answer[Connection]], answer: Answer[Connection]) -> None:
    """At the end, unless others that arrived later were read before it."""
    if queue and queue[-1].due_ns > answer.due_ns:
        insort(queue, answer, key=lambda each: each.due_ns)
    else:
        queue.append(answer)


def run(timing: Timing, host: str, port: int) -> None:
    """Serve until SIGTERM, or Ctrl-C (KeyboardInterrupt); the address goes to stdout once it listens."""
    sockets.allow_many()
    ask_for_exact_timers()
    ask_for_short_slice()
    with bind(host, port) as listener:
        listener.listen(BACKLOG)
        mock = Mock(timing, listener)
        gc.freeze()
        gc.disable()  # nothing here is left in a cycle, and a collection is late tokens
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        sys.stdout.write(f"{address_of(listener)}\n")
        sys.stdout.flush()
        mock.serve()
