"""HTTP connections of `bench serve` whose requests do not end, in a server of this process: what is closed,
what is let go on, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from harness.serve import connections
from harness.serve.connections import MOST_HEAD, Connection
from harness.serve.meters import Meters

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
DROPPED = 'bench_connections_dropped_total{why="%s"} 1.0'
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("done")(scope, receive, send)


async def answer_the_whole(scope: Scope, receive: Receive, send: Send) -> None:
    await Request(scope, receive).body()
    await PlainTextResponse("done")(scope, receive, send)


def talk(app: ASGIApp, client: Client) -> str:
    """What the meters say after a client's talk with a server."""
    meters = Meters()
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    state = ServerState()

    def connection() -> Connection:
        return Connection(config=config, server_state=state, app_state={}, meters=meters)

    async def main() -> None:
        config.load()
        server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await client(reader, writer)
            writer.close()
            while state.connections:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    return meters.text({}).decode()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the connection was closed or reset."""
    came = b""
    try:
        while piece := await reader.read(1 << 16):
            came += piece
    except ConnectionResetError:
        pass
    return came


@pytest.mark.parametrize("part", [b"", b"GET / HTTP/1.1\r\nHos", HEAD, HEAD + b"12345"])
def test_a_request_that_does_not_come_whole_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(connections, "WHOLE_S", 0.05)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        came = await ended(reader)
        assert came.endswith(b"done") == part.startswith(HEAD)

    meters = talk(answer_at_once, client)
    assert DROPPED % "slow" in meters
    assert "bench_connections 0.0" in meters


def test_bytes_that_drip_win_a_request_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WHOLE_S", 0.1)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n")
        gone = asyncio.create_task(ended(reader))
        while not gone.done():
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.01)
        assert await gone == b""

    assert DROPPED % "slow" in talk(answer_at_once, client)


def test_a_request_waits_as_long_as_the_answer_to_the_one_before_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "WHOLE_S", 0.02)
    looked = asyncio.Event()

    async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
        await looked.wait()
        await answer_the_whole(scope, receive, send)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHos")
        await asyncio.sleep(0.2)
        writer.write(b"t: x\r\nConnection: close\r\n\r\n")
        await asyncio.sleep(0.05)
        looked.set()
        assert (await ended(reader)).count(b"HTTP/1.1 200 ") == 2

    assert DROPPED % "slow" not in talk(slowly, client)


def test_a_head_too_large_is_refused_and_counted() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\na: " + b"a" * (MOST_HEAD + 1))
        assert (await ended(reader)).startswith(b"HTTP/1.1 400 ")

    assert DROPPED % "large" in talk(answer_at_once, client)


def test_requests_that_are_sent_at_once_are_all_answered_in_turn() -> None:
    async def its_path(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        await PlainTextResponse(f"<{scope['path']}>")(scope, receive, send)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = [b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(200)]
        writer.write(b"".join(sent))
        answers = [await reader.readuntil(b">") for _ in sent]
        assert [answer.rpartition(b"<")[2] for answer in answers] == [
            b"/%d>" % number for number in range(200)
        ]

    talk(its_path, client)


def test_a_client_that_closes_its_sending_half_has_hung_up() -> None:
    told = []

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            pass
        told.append(message["type"])

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        writer.write_eof()
        assert await ended(reader) == b""

    talk(wait, client)
    assert told == ["http.disconnect"]
