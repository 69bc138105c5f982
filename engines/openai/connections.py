"""The sockets of the client: requests go out, replies are read and stamped, connections are kept.

One thread and one epoll instance. A reply is only taken in here: HTTP is parsed as far as it must be to
see where the body ends (httptools), and the pieces of the body are kept with two stamps: when the last byte
arrived, and when it was read. The first is the kernel's (SO_TIMESTAMPNS): it is right however late this
process comes to read. Where the kernel gives none, as outside of Linux, it is -1.

What a late reader does lose: bytes of several writes that wait together are read together, and all get the
arrival of the last.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from contextlib import suppress
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter_ns

import httptools

from overlap_bench.engines.openai import endpoint
from overlap_bench.engines.openai.endpoint import Endpoint
from overlap_bench.engines.openai.replies import Reply
from overlap_bench.engines.sockets import STAMP_BYTES, arrival_ns, stamp_arrivals

READ = 64 << 10  # bytes of one read
MANY = 512  # sockets of one look at the epoll instance
# Servers close idle connections after 5 s (uvicorn, Node); a request that crosses the close is lost.
IDLE_NS = 4_000_000_000
CHECK_NS = 100_000_000  # between two looks for requests that take too long
COLON = ord(":")


class Clock:
    """From the kernel's stamps (CLOCK_REALTIME) to perf_counter_ns, by one anchor for all connections."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.offset_ns = offset_ns()

    def moved_ns(self) -> int:
        """How far the clocks moved apart since: both are slewed alike, so only by a step of the time."""
        return abs(offset_ns() - self.offset_ns)


def offset_ns() -> int:
    """CLOCK_REALTIME - perf_counter_ns: the tightest of several."""
    return min(_reading() for _ in range(16))[1]


def _reading() -> tuple[int, int]:
    """How long a reading of both clocks took, and their difference."""
    before = perf_counter_ns()
    real = clock_gettime_ns(CLOCK_REALTIME)
    after = perf_counter_ns()
    return after - before, real - (before + after) // 2


class Connection:
    """One socket, and the reply that it waits for."""

    def __init__(
        self,
        where: Endpoint,
        family: int,
        address: tuple[object, ...],
        clock: Clock,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stamp_arrivals(self.socket)
        error = self.socket.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(error, os.strerror(error))
        self.clock = clock
        self.connecting = True
        self.secured = None if tls is None else Secured(tls, where.host)
        self.outgoing = b""  # what the socket has not taken yet
        self.plain = b""  # the request, until it can go out
        self.reply: Reply | None = None
        self.heard_ns = self.idle_since_ns = self.arrived_ns = self.read_ns = 0
        self.keep = self.ended = self.framed = False
        self.parser = httptools.HttpResponseParser(self)

    # -- what httptools calls --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type" and self.reply is not None:
            self.reply.content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self.framed = True

    def on_headers_complete(self) -> None:
        if self.reply is not None:
            self.reply.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        reply = self.reply
        if reply is None:
            return
        reply.pieces.append(body)
        reply.arrived_ns.append(self.arrived_ns)
        reply.read_ns.append(self.read_ns)
        if body[0] != COLON:  # a comment keeps a connection alive, and says nothing of the request
            self.heard_ns = self.read_ns

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() < 200:  # an interim response: the real one follows
            return
        self.keep = self.parser.should_keep_alive()
        self.ended = True

    # -- in and out ----------------------------------------------------------------------------------------

    def begin(self, reply: Reply, request: bytes) -> None:
        """Take a request; it goes out now, or as soon as the connection stands."""
        self.reply, self.plain = reply, request
        self.heard_ns = perf_counter_ns()
        self.keep = self.ended = self.framed = False
        if not self.connecting:
            self.send()

    def send(self) -> None:
        """The request's bytes to the socket. Raises OSError."""
        reply, request, self.plain = self.reply, self.plain, b""
        assert reply is not None
        reply.sent_ns = perf_counter_ns()
        self.outgoing += request if self.secured is None else self.secured.encrypted(request)
        self.flush()
        reply.submitted_ns = perf_counter_ns()

    def flush(self) -> None:
        """What the socket takes of what is to go out. Raises OSError."""
        with suppress(BlockingIOError):
            sent = self.socket.send(self.outgoing)
            self.outgoing = self.outgoing[sent:]

    def writable(self) -> None:
        """The connection stands, or takes more. Raises OSError."""
        if self.connecting:
            error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self.connecting = False
            self.heard_ns = perf_counter_ns()
            if self.secured is None:
                self.send()
            else:
                self.shake_hands(b"")
        elif self.outgoing:
            self.flush()
            if not self.outgoing and self.reply is not None and self.reply.sent_ns >= 0:
                self.reply.submitted_ns = perf_counter_ns()

    def shake_hands(self, data: bytes) -> None:
        """One more step of TLS's beginning; after the last one the request goes out. Raises OSError."""
        assert self.secured is not None
        done, answer = self.secured.shake_hands(data)
        if answer:
            self.outgoing += answer
            self.flush()
        if done and self.plain:
            self.send()

    def readable(self) -> bool:
        """Read once; False at the end of the connection. Raises OSError, httptools.HttpParserError."""
        try:
            data, control, _, _ = self.socket.recvmsg(READ, STAMP_BYTES)
        except BlockingIOError:
            return True
        now = perf_counter_ns()
        if not data:
            return False
        stamp = arrival_ns(control)
        if stamp >= 0:
            arrived = stamp - self.clock.offset_ns
            self.arrived_ns = arrived if arrived < now else now
        else:
            self.arrived_ns = -1
        self.read_ns = now
        if self.secured is not None:
            if not self.secured.ready:
                self.shake_hands(data)
                data = b""
            data = self.secured.decrypted(data)
        if data and self.reply is not None:
            self.parser.feed_data(data)
        elif data:
            return False  # nobody asked: whatever this is, the connection is of no use
        return True

    def alive(self) -> bool:
        """Whether an idle connection still stands, as far as can be known."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class Secured:
    """TLS over memory, so that the socket is read as any other, with its stamps. Raises ssl.SSLError."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        self.ready = False

    def shake_hands(self, data: bytes) -> tuple[bool, bytes]:
        """Whether it is done, and what is to be sent."""
        self._in.write(data)
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self.ready = True
        return self.ready, self._out.read()

    def encrypted(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._out.read()

    def decrypted(self, data: bytes) -> bytes:
        """Everything that `data` completes; b"" before the handshake's end."""
        self._in.write(data)
        found = []
        with suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while self.ready and (part := self._tls.read(READ)):
                found.append(part)
        return b"".join(found)


class Connections:
    """Every connection to one server. `turn` must be called when `epoll` is readable, and after `wait_s`."""

    def __init__(self, where: Endpoint, timeout_s: float) -> None:
        self.epoll = select.epoll()
        self.clock = Clock()
        self.opened = 0  # since it was last set to 0
        self._where = where
        self._family, self._address = endpoint.address(where)
        self._tls = endpoint.tls() if where.scheme == "https" else None
        self._timeout_s = timeout_s
        self._by_descriptor: dict[int, Connection] = {}
        self._idle: list[Connection] = []  # the last one used is the first one used again
        self._ended: list[Reply] = []
        self._check_ns = 0

    def ask(self, reply: Reply, request: bytes) -> None:
        """Send a request. What goes wrong ends the reply like everything else: `turn` gives it back."""
        try:
            connection = self._kept() or self._opened()
        except OSError as error:  # no descriptor, no port left
            self._ended.append(reply)
            reply.failure = f"no connection: {endpoint.why(error)}"
            return
        try:
            connection.begin(reply, request)
            if connection.outgoing:
                self._watch(connection)
        except OSError as error:
            self._lose(connection, self._cause(connection, error))

    def turn(self) -> list[Reply]:
        """Everything that waits, once; the replies that have ended."""
        for descriptor, mask in self.epoll.poll(0, MANY):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self._serve(connection, mask)
        now = perf_counter_ns()
        if now >= self._check_ns:
            self._check_ns = now + CHECK_NS
            self._give_up(now)
        ended, self._ended = self._ended, []
        return ended

    @property
    def replies(self) -> list[Reply]:
        """The replies that are awaited."""
        return [each.reply for each in self._by_descriptor.values() if each.reply is not None]

    def expect_anew(self) -> None:
        """The server was stopped until now: the time that its replies may take begins again."""
        now = perf_counter_ns()
        for connection in self._by_descriptor.values():
            connection.heard_ns = now

    def close_idle(self) -> None:
        """A server closes connections that it has not heard of for long, and one that is stopped hears of
        none."""
        for connection in list(self._idle):
            self._close(connection)

    def wait_s(self) -> float | None:
        """How long the caller may wait for something to happen; None: for ever."""
        if self._ended:
            return 0
        return CHECK_NS / 1e9 if len(self._by_descriptor) > len(self._idle) else None

    def close(self) -> None:
        for connection in list(self._by_descriptor.values()):
            self._close(connection)
        self.epoll.close()

    # -- one connection --------------------------------------------------------------------------------------

    def _kept(self) -> Connection | None:
        """An idle connection that still stands."""
        now = perf_counter_ns()
        while self._idle:
            connection = self._idle[-1]
            if now - connection.idle_since_ns < IDLE_NS and connection.alive():
                return self._idle.pop()
            self._close(connection)
        return None

    def _opened(self) -> Connection:
        """A new one, on its way. Raises OSError."""
        connection = Connection(self._where, self._family, self._address, self.clock, self._tls)
        self.opened += 1
        self._by_descriptor[connection.socket.fileno()] = connection
        self.epoll.register(connection.socket, select.EPOLLIN | select.EPOLLOUT)
        return connection

    def _serve(self, connection: Connection, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT or connection.connecting:
                connection.writable()
                self._watch(connection)
            if mask & ~select.EPOLLOUT and not connection.readable():
                self._lose(connection, self._cause(connection, None))
            elif connection.ended:
                self._done(connection)
            elif connection.outgoing:
                self._watch(connection)
        except httptools.HttpParserError as error:
            self._lose(connection, f"the reply is not HTTP: {str(error).lower() or type(error).__name__}")
        except OSError as error:
            self._lose(connection, self._cause(connection, error))

    def _watch(self, connection: Connection) -> None:
        """Watch for room to write only while there is something to write."""
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.outgoing or connection.connecting else 0)
        self.epoll.modify(connection.socket, wanted)

    def _done(self, connection: Connection) -> None:
        """A whole reply: the connection is kept where both sides can."""
        reply, connection.reply = connection.reply, None
        connection.ended = False
        assert reply is not None
        reply.whole = True
        self._ended.append(reply)
        if connection.keep and not connection.outgoing:
            connection.idle_since_ns = perf_counter_ns()
            self._idle.append(connection)
        else:
            self._close(connection)

    def _lose(self, connection: Connection, cause: str) -> None:
        """A connection that is of no use any more, and the reply that will not come."""
        reply, connection.reply = connection.reply, None
        self._close(connection)
        if reply is None:
            return
        if reply.status and not connection.framed and cause == CLOSED:
            reply.whole = True  # such a body ends with the connection
        else:
            reply.failure = cause
        self._ended.append(reply)

    def _close(self, connection: Connection) -> None:
        del self._by_descriptor[connection.socket.fileno()]  # closing takes it out of epoll
        if connection in self._idle:
            self._idle.remove(connection)
        connection.socket.close()

    def _cause(self, connection: Connection, error: OSError | None) -> str:
        """Why a reply does not come; `error` None: the server closed the connection."""
        reply = connection.reply
        if isinstance(error, ssl.SSLError):
            return endpoint.why(error)
        if connection.connecting and error is not None:
            return f"no server at {self._where.url}: {endpoint.why(error)}"
        if reply is None or reply.sent_ns < 0:
            return "the server closed the connection before the request"
        if not reply.status:
            return "the server closed the connection without a reply"
        return CLOSED

    def _give_up(self, now: int) -> None:
        """Requests for which nothing came for too long."""
        latest = now - round(self._timeout_s * 1e9)
        for connection in list(self._by_descriptor.values()):
            if connection.reply is not None and connection.heard_ns < latest:
                what = "no connection" if connection.connecting else "nothing came"
                self._lose(connection, f"timed out: {what} for {self._timeout_s:g} s")


CLOSED = "the stream was cut short: the server closed the connection"
