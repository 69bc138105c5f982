"""A really running server, and a client that sees each event as it comes: raw HTTP over loopback."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.bench_command import PATIENCE_S, Bench, start

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a socket resets its connection


@dataclass(frozen=True, slots=True)
class Server:
    bench: Bench
    url: str

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case) and body."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        status, _, content = self.ask("POST", path, body, **headers)
        return status, json.loads(content)

    def get(self, path: str) -> tuple[int, Any]:
        status, _, content = self.ask("GET", path)
        return status, json.loads(content)

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Streaming]:
        """A streamed answer, left open until the client is done with it."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            yield Streaming(connection, connection.getresponse())
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a streamed answer, [DONE] as None."""
        with self.stream(path, body) as streaming:
            assert streaming.response.status == 200, streaming.response.read()
            return list(streaming)


@dataclass(frozen=True, slots=True)
class Streaming:
    """Server-sent events, one by one."""

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse

    def __iter__(self) -> Iterator[Any]:
        while line := self.response.readline():
            if line.startswith(b"data: "):
                yield None if line == b"data: [DONE]\n" else json.loads(line.removeprefix(b"data: "))

    def reset(self) -> None:
        """Hang up without a farewell."""
        sock = self.response.fp.raw._sock  # type: ignore[union-attr]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@contextmanager
def serving(environment: dict[str, str], folder: Path, *arguments: str) -> Iterator[Server]:
    """A `bench mock` on any free port, once it takes requests; it is told to stop at the end."""
    bench = start(environment, folder, "mock", "--port", "0", *arguments)
    try:
        assert bench.popen.stdout is not None
        url = bench.popen.stdout.readline().strip()
        assert url.startswith("http://"), bench.stderr.read_text()
        bench.look()
        yield Server(bench, url)
    finally:
        bench.popen.terminate()
        bench.popen.wait(PATIENCE_S)


def text_of(events: Sequence[Any]) -> str:
    """What a stream's choices say together."""
    said = [choice for event in events if event is not None for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in said)
