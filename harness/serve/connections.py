"""HTTP connections as uvicorn has them, but for clients that never end, or go before their time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from harness.serve.meters import Meters

MOST_HEAD = 64 << 10  # bytes
WHOLE_S = 40  # from a request's first byte to its last: longer than App reads a body, which says so itself


class Connection(HttpToolsProtocol):
    """Closes where a request's head, or what stands between the pieces of its body, does not end: the parser
    would keep all of it. So it does where a request takes too long to come, or is answered already and still
    comes. Tells every request on it that the client is gone, where uvicorn tells the last.

    A client that closes its sending half is gone too: nothing tells it from one that has hung up, and what
    nobody waits for is not worth computing.
    """

    def __init__(self, *given: Any, meters: Meters, **named: Any) -> None:
        super().__init__(*given, **named)
        self._meters = meters

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unended = 0  # bytes since a request or a piece of a body ended
        self._unanswered: deque[RequestResponseCycle] = deque()  # they are answered in turn
        self._in_head = True  # of a request; or of the first one, which has not begun
        self._limit = self.loop.call_later(WHOLE_S, self._took_too_long)
        self._meters.connections.inc()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._unended += len(data)
        super().data_received(data)
        if self._unended > MOST_HEAD and not self.transport.is_closing():
            self._meters.dropped.labels("large").inc()
            self.send_400_response(f"The head of the request has more than {MOST_HEAD} bytes.")

    def _took_too_long(self) -> None:
        """A request that waits for the answer to the one before it, or is being answered, may: the client
        may have been told to wait."""
        reads_on = self._unanswered and (self._in_head or self.cycle in self._unanswered)
        if reads_on and not self.transport.is_closing():
            self._limit = self.loop.call_later(WHOLE_S, self._took_too_long)
        else:
            self._meters.dropped.labels("slow").inc()
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._limit.cancel()
        self._limit = self.loop.call_later(WHOLE_S, self._took_too_long)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unended = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._limit.cancel()
        self._unended = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.cancel()
        self._meters.connections.dec()
        for each in self._unanswered:
            each.disconnected = True
            each.message_event.set()
        super().connection_lost(exc)
