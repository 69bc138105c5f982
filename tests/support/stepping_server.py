"""A server as engines' own are: HTTP here, a process that decodes all requests in steps, and one behind it
that turns ids into text.

    python -m tests.support.stepping_server PORT [SECONDS A STEP]
"""

import asyncio
import json
import queue
import sys
import threading
import time
from contextlib import suppress

from tests.support.small_server import DONE, WORDS, Asked, SmallServer, begin, event, piece, usage

STEP_S = 0.003
SELF = (sys.executable, "-m", "tests.support.stepping_server")


def run_engine(step_s: float) -> None:
    """Read a request a line, [its number, its tokens]; write after each step a line with an id for each
    request that runs: [[number, id], ...]."""
    asked: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            asked.put(tuple(json.loads(line)))
        asked.put(None)

    threading.Thread(target=listen, daemon=True).start()
    left: dict[int, int] = {}
    while True:
        while not left or not asked.empty():
            request = asked.get()
            if request is None:
                return
            left[request[0]] = request[1]
        time.sleep(step_s)
        print(json.dumps([[number, count] for number, count in left.items()]), flush=True)
        left = {number: count - 1 for number, count in left.items() if count > 1}


def run_detokenizer() -> None:
    """Read what the engine writes; write it with words for ids."""
    for line in sys.stdin:
        step = [[number, WORDS[token % len(WORDS)]] for number, token in json.loads(line)]
        print(json.dumps(step), flush=True)


class SteppingServer(SmallServer):
    """Streams each request's words as its steps end."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._streams: dict[int, asyncio.Queue[str]] = {}

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._engine = await asyncio.create_subprocess_exec(
            *SELF, "engine", str(self._step_s), stdin=pipe, stdout=pipe
        )
        self._detokenizer = await asyncio.create_subprocess_exec(
            *SELF, "detokenizer", stdin=pipe, stdout=pipe
        )
        self._tasks = [asyncio.create_task(each) for each in (self._pass_on(), self._deliver())]

    async def _pass_on(self) -> None:
        assert self._engine.stdout is not None
        assert self._detokenizer.stdin is not None
        async for line in self._engine.stdout:
            self._detokenizer.stdin.write(line)

    async def _deliver(self) -> None:
        assert self._detokenizer.stdout is not None
        async for line in self._detokenizer.stdout:
            for number, word in json.loads(line):
                self._streams[number].put_nowait(word)

    async def tokens(self, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        number, total = len(self._streams), asked.body["max_tokens"]
        words = self._streams[number] = asyncio.Queue()
        assert self._engine.stdin is not None
        self._engine.stdin.write(json.dumps([number, total]).encode() + b"\n")
        await begin(writer)
        if "messages" in asked.body:
            await piece(writer, event(asked, role=True))
        for index in range(total):
            word = await words.get()
            await piece(writer, event(asked, text=word, reason="length" if index == total - 1 else None))
        await piece(writer, usage(1, total) + DONE)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def main(port: int, step_s: float) -> None:
    print("loading the model", flush=True)
    server = SteppingServer(step_s)
    await server.start()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", port)
    await listening.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        match sys.argv[1:]:
            case ["engine", step_s]:
                run_engine(float(step_s))
            case ["detokenizer"]:
                run_detokenizer()
            case [port, *step_s]:
                asyncio.run(main(int(port), float(step_s[0]) if step_s else STEP_S))
