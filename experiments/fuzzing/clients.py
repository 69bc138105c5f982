"""Clients that do a server no good, one after the other for as long as they are let. They are in a process of
their own, so that what they cost is not paid by whoever measures beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import msgspec

from experiments.common.bench_command import PATIENCE_S
from experiments.fuzzing import servers
from experiments.fuzzing.case import Broken

PER_S = 3.0
HELD_S = 90.0  # longer than a server may keep a connection on which nothing comes
DRIPS_S = 4.0
LARGE = 8 << 20  # bytes
WORDS = 20_000  # of a prompt that is too long
LONGEST = 190  # tokens of an answer that nobody waits for
PATH = "/v1/completions"
SOUND = {"prompt": "Hello there", "max_tokens": 8, "temperature": 0}
ENDLESS = {"max_tokens": LONGEST, "ignore_eos": True, "temperature": 0}
BEYOND = (
    {"seed": 1 << 70},
    {"top_k": 1 << 63},
    {"prompt": [1 << 70]},
    {"temperature": -1},
    {"max_tokens": -5},
)
NO_JSON = (
    b"{",
    b"",
    b"[" * 100_000,
    b'{"prompt": "a", "n": 1e999}',
    b'{"prompt": "\xff"}',
    b"nonsense" * 1000,
)
Attack = Callable[[str, Random], Coroutine[Any, Any, str]]


class Word(StrEnum):
    """What the process is told; each is answered with its Tally since the one before."""

    GO = "go on, or begin"
    REST = "leave the server alone"
    END = "end"


class Tally(msgspec.Struct):
    """How many clients came to which end, and what a server should not have done to them."""

    ended: dict[str, int] = {}
    faults: list[str] = []


@contextmanager
def attacking(url: str, seed: int) -> Iterator[Callable[[Word], Tally]]:
    """Tells the process a word; it rests until it is told to go."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(url, theirs, seed), daemon=True)
    process.start()
    theirs.close()

    def tell(word: Word) -> Tally:
        ours.send_bytes(word.encode())
        return msgspec.json.decode(ours.recv_bytes(), type=Tally)

    try:
        yield tell
    finally:
        ours.close()  # which ends it, if nothing did
        process.join(PATIENCE_S)


def _attack(url: str, orders: Connection, seed: int) -> None:
    asyncio.run(_obey(url, orders, Random(seed)))


async def _obey(url: str, orders: Connection, random: Random) -> None:
    tally = Tally()
    sending: asyncio.Task[None] | None = None
    word = Word.REST
    while word is not Word.END:
        try:
            word = Word((await asyncio.to_thread(orders.recv_bytes)).decode())
        except (EOFError, OSError):
            word = Word.END
        if word is Word.GO and sending is None:
            sending = asyncio.create_task(_send(url, random, tally))
        elif word is not Word.GO and sending is not None:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            sending = None
        with suppress(OSError):
            orders.send_bytes(msgspec.json.encode(tally))
        tally.ended.clear()
        tally.faults.clear()


async def _send(url: str, random: Random, tally: Tally) -> None:
    """Clients at random times, until cancelled: then all of them hang up."""
    async with asyncio.TaskGroup() as clients:
        while True:
            await asyncio.sleep(random.expovariate(PER_S))
            attack = random.choices(list(ATTACKS), list(ATTACKS.values()))[0]
            clients.create_task(_one(attack, url, Random(random.random()), tally))


async def _one(attack: Attack, url: str, random: Random, tally: Tally) -> None:
    name = attack.__name__.replace("_", " ")
    try:
        end = f"{name}: {await attack(url, random)}"
    except Exception as error:
        end = f"{name}: fault"
        tally.faults.append(f"{name}: {type(error).__name__}: {error}"[:500])
    tally.ended[end] = tally.ended.get(end, 0) + 1


# -- the clients -----------------------------------------------------------------------------------------


async def whatever(url: str, random: Random) -> str:
    """Of the fuzzer's: bad JSON, bad HTTP, several requests at once, half ones, resets."""
    return await asyncio.to_thread(servers.attempt, servers.address_of(url), servers.sent(random))


async def hangs_up(url: str, random: Random) -> str:
    """Before a token, in mid-stream, or on a whole answer; with a farewell or without."""
    streamed = random.random() < 0.8
    prompt = [random.randrange(1, 4096) for _ in range(random.randint(1, 60))]
    body = ENDLESS | {"prompt": prompt, "stream": streamed}
    chunks = random.choice((0, 0, 1, 2, 5, 20, 60)) if streamed else 0
    async with servers.connected(url, servers.request(PATH, servers.dumped(body))) as (reader, writer):
        for _ in range(chunks):
            while not (line := await reader.readline()).startswith(b"data: {"):
                if not line:
                    raise Broken("ended", "the server hung up first")
        if not chunks:
            await asyncio.sleep(random.random() * 0.1)
        if random.random() < 0.5:
            servers.reset(writer)
    return "in mid-stream" if chunks else "before a token" if streamed else "on a whole answer"


async def half_open(url: str, random: Random) -> str:
    """Part of a request, or nothing, and then silence. The server must be the one that ends it."""
    whole = servers.request(PATH, servers.dumped(SOUND))
    part = whole[: random.choice((0, random.randrange(len(whole))))]
    async with servers.connected(url, part) as (reader, _):
        return _status(await _all(reader, HELD_S)) or "dropped"


async def drips(url: str, random: Random) -> str:
    """A good request, a few bytes at a time: it must be served."""
    body = SOUND | {"stream": random.random() < 0.5}
    whole = servers.request(PATH, servers.dumped(body))
    async with servers.connected(url, b"") as (reader, writer):
        for at in range(0, len(whole), 8):
            writer.write(whole[at : at + 8])
            await asyncio.sleep(random.random() * DRIPS_S * 16 / len(whole))
        return _must(_status(await _all(reader, PATIENCE_S)), "200")


async def reads_nothing(url: str, random: Random) -> str:
    """A stream that is not read."""
    asked = servers.request(PATH, servers.dumped(ENDLESS | {"prompt": [5, 6, 7], "stream": True}))
    async with servers.connected(url, asked, received=2048) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(random.random() * 5)
        servers.reset(writer)
    return "leaves"


async def too_large(url: str, random: Random) -> str:
    """A body of megabytes, which need not be read to its end."""
    body = json.dumps({"prompt": "a " * (LARGE // 2)}).encode()
    async with servers.connected(url, servers.request(PATH, body)) as (reader, _):
        return _must(_status(await _all(reader, PATIENCE_S)) or "dropped", "413", "dropped")


async def too_long(url: str, random: Random) -> str:
    body = servers.dumped(SOUND | {"prompt": "hello world " * WORDS})
    async with servers.connected(url, servers.request(PATH, body)) as (reader, _):
        return _must(_status(await _all(reader, PATIENCE_S)), "400")


async def out_of_range(url: str, random: Random) -> str:
    body = servers.dumped(SOUND | random.choice(BEYOND))
    async with servers.connected(url, servers.request(PATH, body)) as (reader, _):
        return _must(_status(await _all(reader, PATIENCE_S)), "400")


async def no_json(url: str, random: Random) -> str:
    async with servers.connected(url, servers.request(PATH, random.choice(NO_JSON))) as (reader, _):
        return _must(_status(await _all(reader, PATIENCE_S)), "400")


async def many_at_once(url: str, random: Random) -> str:
    """Connections on which nothing is asked."""
    for _ in range(30):
        async with servers.connected(url, b""):
            pass
    return "leave"


ATTACKS: dict[Attack, int] = {
    whatever: 8,
    hangs_up: 6,
    drips: 2,
    half_open: 1,
    reads_nothing: 1,
    too_large: 1,
    too_long: 2,
    out_of_range: 2,
    no_json: 2,
    many_at_once: 1,
}


async def _all(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """What comes until the connection ends. Raises Broken where it does not."""
    received = b""
    try:
        async with asyncio.timeout(seconds):
            while piece := await reader.read(1 << 16):
                received += piece
    except ConnectionError:
        pass
    except TimeoutError:
        raise Broken("slow", f"no end within {seconds:g} s") from None
    return received


def _status(received: bytes) -> str:
    return received[9:12].decode() if received.startswith(b"HTTP/1.1 ") else ""


def _must(found: str, *among: str) -> str:
    if found not in among:
        raise Broken("status", f"{found or 'no answer'} instead of {' or '.join(among)}")
    return found
