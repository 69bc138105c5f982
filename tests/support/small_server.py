"""A small server that talks as an OpenAI-compatible one does, well or badly: what it does is asked of it by
the prompt. Raw asyncio, so that every byte is its own.

    python -m tests.support.small_server PORT [SECONDS BEFORE IT LISTENS]
"""

import asyncio
import json
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from overlap_bench.engines.openai.engine import ASKED_FIRST
from tests.support.bench_command import PATIENCE_S

MODEL = "small"
WORDS = ("One", " two", " three", " four", " five", " six", " seven", " eight")
STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    connection: int

    @property
    def prompt(self) -> str:
        if "messages" in self.body:
            return str(self.body["messages"][0]["content"])
        return str(self.body.get("prompt", ""))


@dataclass
class SmallServer:
    """`asked`: every request for tokens so far but the client's first, which is no round's. `gap_s`: between
    two chunks. `unknown`: a field that it refuses."""

    gap_s: float = 0.002
    unknown: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    replying: int = 0  # requests of any kind whose reply is not sent to its end
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while await self.reply(reader, writer, number):
                await writer.drain()
                self.replying -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        """Answer one request; whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.replying += 1
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            await self.tell(path, writer)
            return True
        asked = Asked(path, headers, json.loads(body), number)
        if asked.prompt != ASKED_FIRST.prompt:
            self.asked.append(asked)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            await whole(writer, 404, {"detail": "Not Found"})
            return True
        return await self.tokens(asked, writer)

    async def tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "max_model_len": 4096}
            await whole(writer, 200, {"object": "list", "data": [card]})
        elif path == "/health":
            await whole(writer, 200, {})
        else:
            await whole(writer, 404, {"detail": "Not Found"})

    async def tokens(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        """The reply that the prompt asks for."""
        if self.unknown in asked.body:
            said = f"Unsupported parameter: '{self.unknown}'. Use 'max_completion_tokens' instead."
            await whole(writer, 400, {"error": {"message": said, "code": "unsupported_parameter"}})
            return True
        match asked.prompt:
            case "refuse":
                await whole(writer, 400, {"error": {"message": "unknown field: ignore_eos"}})
            case "refuse as transformers does":
                await whole(writer, 422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"})
            case "break":
                await whole(writer, 500, {"error": {"message": "out of memory"}})
            case "tell the key":
                await whole(writer, 401, {"error": f"no such key: {asked.headers.get('authorization')}"})
            case "page":
                await whole(writer, 200, {"choices": [{"text": "all at once"}]})
            case "silence":
                await asyncio.sleep(3600)
            case "comments":
                await begin(writer)
                while True:
                    await piece(writer, b": still there\n\n")
                    await asyncio.sleep(0.02)
            case "hang up":
                return False
            case "no http":
                writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
                await writer.drain()
                return False
            case "cut":
                await begin(writer)
                await piece(writer, event(asked, text="One"))
                return False
            case "cut in a chunk":
                await begin(writer)
                writer.write(b"ff\r\n" + event(asked, text="One"))
                await writer.drain()
                return False
            case "stop short":
                await self.stream(asked, writer, [event(asked, text="One")])
            case "malformed":
                await self.stream(asked, writer, [event(asked, text="One"), b'data: {"choices": [\n\n', DONE])
            case "error in the stream":
                error = b'data: {"error": {"message": "the engine died", "code": 500}}\n\n'
                await self.stream(asked, writer, [event(asked, text="One"), error, DONE])
            case "close":
                await begin(writer, "Connection: close\r\n", framed=False)
                writer.write(b"".join([part async for part in self.parts(asked)]))
                await writer.drain()
                return False
            case "close after it":
                await begin(writer, "Connection: close\r\n")
                async for part in self.parts(asked):
                    await piece(writer, part)
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return False
            case _:
                await self.stream(asked, writer, [part async for part in self.parts(asked)])
        return True

    async def stream(self, asked: Asked, writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
        await begin(writer)
        for part in parts:
            if self.gap_s:
                await asyncio.sleep(self.gap_s)
            await piece(writer, part)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def parts(self, asked: Asked) -> AsyncIterator[bytes]:
        """A good reply, in the pieces in which it is written."""
        words = WORDS[: asked.body.get("max_tokens") or asked.body["max_completion_tokens"]]
        if "messages" in asked.body:
            yield event(asked, role=True)
        for index, word in enumerate(words):
            yield event(asked, text=word, reason="length" if index == len(words) - 1 else None)
        if asked.body.get("stream_options", {}).get("include_usage"):
            yield usage(1, len(words))
        yield DONE


def event(asked: Asked, text: str = "", reason: str | None = None, role: bool = False) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if "messages" in asked.body:
        choice["delta"] = {"role": "assistant", "content": ""} if role else {"content": text}
    else:
        choice["text"] = text
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


async def begin(writer: asyncio.StreamWriter, more: str = "", framed: bool = True) -> None:
    framing = "Transfer-Encoding: chunked\r\n" if framed else ""
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {STREAM}\r\n{framing}{more}\r\n".encode())


async def piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


async def whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


@contextmanager
def running(
    gap_s: float = 0.002, tls: ssl.SSLContext | None = None, unknown: str = ""
) -> Iterator[SmallServer]:
    """A server on a free port, in a thread."""
    server = SmallServer(gap_s, unknown)
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def listen() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stopped.wait()
        listening.close()

    async def all_of_it() -> None:
        await listen()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(all_of_it()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(PATIENCE_S)
        loop.close()


async def main(port: int, wait_s: float) -> None:
    print("loading the model", flush=True)
    await asyncio.sleep(wait_s)
    listening = await asyncio.start_server(SmallServer().serve, "127.0.0.1", port)
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
