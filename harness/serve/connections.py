"""HTTP connections as uvicorn has them, but for clients that never end, or go before their time."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_HEAD = 64 << 10  # bytes


class Connection(HttpToolsProtocol):
    """Closes where a request's head, or what stands between the pieces of its body, does not end: the parser
    would keep all of it. Tells every request on it that the client is gone, where uvicorn tells the last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unended = 0  # bytes since a request or a piece of a body ended
        self._unanswered: deque[RequestResponseCycle] = deque()  # they are answered in turn
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._unended += len(data)
        super().data_received(data)
        if self._unended > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of the request has more than {MOST_HEAD} bytes.")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unended = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unended = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for each in self._unanswered:
            each.disconnected = True
            each.message_event.set()
        super().connection_lost(exc)
