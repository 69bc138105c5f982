"""Both servers over a loopback socket: what HTTP allows, what JSON allows, and what neither does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psutil

from experiments.common.bench_command import PATIENCE_S, Bench, start
from experiments.fuzzing import mutations, values
from experiments.fuzzing.case import LIMIT_S, Broken, Gone, Target
from harness.serve.parsing import IGNORED, NEUTRAL, ChatBody, CompletionBody

CONTEXT = 64
MANY = 10_000  # tokens
ENGINE = (
    "--set",
    "model=micro-gpt2",
    "--set",
    f"max_context={CONTEXT}",
    "--device",
    "emulated",
    "--set",
    "max_batch_size=8",
    "--engine",
    "overlap",
)
MOCK = ("--mock", "--ttft-ms", "0", "--itl-ms", "0")
PATHS = {
    "/v1/completions": {"prompt": "Hello there", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}
NAMES = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *NEUTRAL, *IGNORED})
NO_FAULT = {200, 307, 400, 401, 404, 405, 408, 413, 429}  # of the server's
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a socket resets its connection
RAW_JSON = (
    b"1e999",
    b"-1e999",
    b"1" * 4000,
    b"NaN",
    b"Infinity",
    b'"\xff\xfe"',
    b'"\\ud800"',
    b"[" * 3000,
    b"",
    b"{}{}",
    b'"\\u0000"',
    b"01",
    b"+1",
    b"'a'",
    b"[1,]",
    b"tru",
    b"-",
    b"1.",
    b".5",
    b"\xef\xbb\xbf{}",
    b'{"a":1,"a":2}',
    b"[[]]",
    b"[[1],[2]]",
    b'["a","b"]',
    b"[1.5]",
    b"[true]",
    b"[-1]",
    b"[null]",
)
HEADS = (
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 1e3",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Content-Length:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    b"Expect: 100-continue",
    b"Upgrade: websocket\r\nConnection: Upgrade",
    b"Connection: keep-alive, close",
    b"Host",
    b": x",
    b"A: \x00",
    b"A: " + b"b" * 70_000,
    b"\r\n".join(b"H%d: x" % each for each in range(500)),
    b"A:\r\n b",
    b"\xff: \xff",
    b"Content-Type: application/x-www-form-urlencoded",
    b"Content-Encoding: gzip",
    b"Authorization: Bearer \xff",
    b"Upgrade: h2c\r\nHTTP2-Settings: x",
)
TARGETS = (
    b"/v1/models",
    b"/health",
    b"/metrics",
    b"/",
    b"*",
    b"//",
    b"/v1/completions?x=%ff",
    b"/%00",
    b"/v1/%zz",
    b"http://x/health",
    b"http://[::1",
    b"/" + b"a" * 70_000,
    b"/..",
    b"/\xff",
    b"\xe2\x98\x83",
    b"?",
    b"#",
    b"/v1/chat/completions/",
    b"/lateness",
    b"/health HTTP/1.1 x",
    b"",
)
METHODS = (
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"PATCH",
    b"CONNECT",
    b"TRACE",
    b"PRI",
    b"get",
    b"G" * 300,
    b"",
    b"\0",
    b"MKCOL",
    b"M-SEARCH",
)
VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.1.1")


class Way(StrEnum):
    """How a client goes on once it has sent: waits for the server's end, half closes, hangs up, resets."""

    WAITS = "waits"
    HALF = "half closes"
    LEAVES = "hangs up"
    RESETS = "resets"


@dataclass(frozen=True, slots=True)
class Sent:
    """`answered`: it is whole, and asks for the connection's end, so there must be an answer."""

    kind: str
    data: bytes
    way: Way
    answered: bool = False

    def __str__(self) -> str:
        return f"{self.kind}, {self.way}: {self.data[:500]!r}"


def request(path: str, body: bytes, more: bytes = b"", last: bool = True) -> bytes:
    """A sound one."""
    end = b"Connection: close\r\n" if last else b""
    length = str(len(body)).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %b\r\n%b%b\r\n%b" % (
        path.encode(),
        length,
        end,
        more,
        body,
    )


def dumped(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "replace")


def of_measure(body: Any) -> Any:
    """Without a wish for millions of tokens, which the mock fulfils: that takes long, and is no fault."""
    many = isinstance(body, dict) and [
        name for name, value in body.items() if isinstance(value, int) and MANY < value < 1 << 31
    ]
    return body | dict.fromkeys(many, MANY) if many else body


def body_of(path: str, random: Random) -> bytes:
    """A body that may be good: the valid one changed, or with fields that it may have."""
    body: Any = json.loads(json.dumps(PATHS[path]))
    match random.randrange(4):
        case 0:
            return dumped(of_measure(mutations.changed(body, random)))
        case 1:
            name, value = random.choice(NAMES).encode(), random.choice(RAW_JSON)
            return dumped(body)[:-1] + b', "%b": %b}' % (name, value)
        case 2:
            return mutations.in_bytes(dumped(body), random)
        case _:
            for _ in range(random.randrange(4)):
                body[random.choice(NAMES)] = values.any_value(random)
            body["stream"] = random.choice((True, False))
            return dumped(of_measure(body))


def sent(random: Random) -> Sent:
    path = random.choice(list(PATHS))
    match random.randrange(10):
        case 0 | 1 | 2 | 3 | 4:
            return Sent("body", request(path, body_of(path, random)), Way.WAITS, answered=True)
        case 5:
            several = [
                request(path, body_of(path, random), last=False) for _ in range(random.randrange(1, 6))
            ]
            data = b"".join(several) + request(path, dumped(PATHS[path]))
            return Sent("pipelined", data, random.choice((Way.HALF, Way.LEAVES, Way.RESETS, Way.WAITS)))
        case 6:
            body = dumped(PATHS[path] | {"stream": random.choice((True, False)), "max_tokens": 40})
            data = request(path, body)
            return Sent(
                "leaves",
                data[: random.choice((len(data), random.randrange(len(data))))],
                random.choice((Way.LEAVES, Way.RESETS, Way.HALF)),
            )
        case 7:
            head = b"%b %b %b\r\n" % (random.choice(METHODS), random.choice(TARGETS), random.choice(VERSIONS))
            lines = [random.choice(HEADS) for _ in range(random.randrange(3))]
            data = head + b"\r\n".join([b"Host: x", *lines, b"", dumped(PATHS[path])])
            return Sent("head", data, Way.HALF)
        case 8:
            body = dumped(PATHS[path])
            chunks = b"".join(_chunk(body[at : at + 20], random) for at in range(0, len(body), 20))
            head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            return Sent("chunks", head % path.encode() + chunks + b"0\r\n\r\n", Way.HALF)
        case _:
            data = random.choice(
                (request(path, body_of(path, random)), b"", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0")
            )
            return Sent("bytes", mutations.in_bytes(data, random), random.choice((Way.HALF, Way.RESETS)))


def _chunk(piece: bytes, random: Random) -> bytes:
    size = b"%x" % len(piece)
    if random.random() < 0.1:
        size = random.choice(
            (b"-1", b"ffffffffffffffff", b"fffffffffffffffff", b"0x5", b"", b"5;" + b"x" * 5000, b"g", b"0")
        )
    return size + b"\r\n" + piece + random.choice((b"\r\n",) * 9 + (b"\n",))


def answer(address: tuple[str, int], case: Sent) -> bytes:
    """All that comes back until the server ends the connection; nothing where the client does not wait."""
    with socket.create_connection(address, timeout=LIMIT_S) as client:
        with suppress(OSError):  # it may be refused before it is all sent
            client.sendall(case.data)
            if case.way is Way.HALF:
                client.shutdown(socket.SHUT_WR)
        if case.way is Way.RESETS:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        received = b""
        if case.way in (Way.WAITS, Way.HALF):
            with suppress(ConnectionError):
                while piece := client.recv(1 << 16):
                    received += piece
        return received


@asynccontextmanager
async def connected(
    url: str, data: bytes, received: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of its own on which that was sent; it may have been refused before all of it was.
    `received`: how many bytes the kernel keeps for a client that does not read."""
    client = socket.socket()
    if received is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address_of(url))
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        writer.write(data)
        with suppress(ConnectionError):
            await writer.drain()
        yield reader, writer
    finally:
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Closing it says no farewell."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def attempt(address: tuple[str, int], case: Sent) -> str:
    """Raises Broken for a fault of the server's, and for no answer where one is due."""
    try:
        received = answer(address, case)
    except TimeoutError:
        raise Broken("slow", f"no end within {LIMIT_S:g} s") from None
    except ConnectionRefusedError:
        raise Gone("gone", "nobody listens any more") from None
    statuses = [int(each) for each in re.findall(rb"(?:^|\r\n|\n|\})HTTP/1\.1 (\d{3}) ", received)]
    if case.answered and not statuses:
        raise Broken("no answer", repr(received[:200]))
    for status in statuses:
        if status not in NO_FAULT:
            raise Broken(f"status {status}", repr(received[-500:]))
    if case.answered and statuses[0] != 200:
        _, _, body = received.partition(b"\r\n\r\n")
        _check_error(body)
    return f"{case.kind}: {', '.join(map(str, sorted(set(statuses)))) or case.way}"


def _check_error(body: bytes) -> None:
    """One line, in the form that OpenAI's clients read."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise Broken("error body", repr(body[:300])) from None
    if len(message) > 2000 or "\n" in message:
        raise Broken("long error", repr(message[:300]))


@contextmanager
def running(arguments: Sequence[str], **more: str) -> Iterator[tuple[Bench, str]]:
    """A `bench serve` and its address, once it takes requests. It is told to end, if it has not ended yet.
    `more`: of its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "BENCH_API_KEY"} | more
    with TemporaryDirectory() as folder:
        bench = start(environment, Path(folder), "serve", "--port", "0", *arguments)
        try:
            assert bench.popen.stdout is not None
            url = bench.popen.stdout.readline().strip()
            assert url, bench.stderr.read_text()
            yield bench, url
        finally:
            bench.popen.terminate()
            bench.popen.wait(PATIENCE_S)


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


@contextmanager
def served(arguments: Sequence[str], gauges: Sequence[str]) -> Iterator[Target[Sent]]:
    """`gauges`: what must be 0 while nobody asks."""
    with running(arguments) as (bench, url):
        address = address_of(url)
        yield Target(
            make=sent,
            attempt=partial(attempt, address),
            settle=lambda: _settle(address, gauges, bench.stderr),
            rss=lambda: _rss(bench.popen.pid),
        )


def _settle(address: tuple[str, int], gauges: Sequence[str], stderr: Path) -> None:
    """Once nobody asks any more, nothing may be left of anybody, and a good request is served."""
    asked = Sent(
        "good", request("/v1/completions", dumped(PATHS["/v1/completions"])), Way.WAITS, answered=True
    )
    if not attempt(address, asked).endswith("200"):
        raise Broken("unwell", "a good request is refused")
    if said := [
        line for line in stderr.read_text().splitlines() if "Traceback" in line or "Exception" in line
    ]:
        raise Broken("stderr", said[0])
    for _ in range(100 if gauges else 0):
        head = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        lines = answer(address, Sent("meters", head, Way.WAITS)).decode().splitlines()
        left = [line for line in lines if line.startswith(tuple(gauges)) and float(line.split()[-1])]
        if not left:
            return
        time.sleep(0.05)
    if gauges:
        raise Broken("left", ", ".join(left))


def _rss(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(int(each.memory_info().rss) for each in (process, *process.children(recursive=True)))


def engine() -> Any:
    """`bench serve` with a small model."""
    busy = (
        "bench_requests_in_flight ",
        "bench_requests_preparing ",
        "bench_engine_requests_running ",
        "bench_engine_kv_blocks_used ",
    )
    return served(ENGINE, busy)


def mock() -> Any:
    """`bench serve --mock`."""
    return served(MOCK, ())
