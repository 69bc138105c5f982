"""Prompts in processes of their own: as many at once as there are processes, none that nobody waits for, and
none that outlasts the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from tokenizers import Tokenizer, normalizers

from engines.overlap.presets import load_tokenizer, tokenizer_file
from harness.run.hosts import RunFailed
from harness.serve import tokenizing as module
from harness.serve.parsing import Refused
from harness.serve.tokenizing import PROCESSES, Tokenizing

SLOW = "hello world " * 600_000  # seconds of work, and half a gigabyte


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | int | float]:
    """One whose texts may have any length: what its tokenizer strips away is no token."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file("tiny-gpt2")))
    tokenizer.normalizer = normalizers.Strip()
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return {"name": "tiny-gpt2", "tokenizer": str(path), "context": 64}


@asynccontextmanager
async def started(model: dict[str, str | int | float]) -> AsyncIterator[Tokenizing]:
    tokenizing = Tokenizing(model)
    try:
        await tokenizing.start()
        yield tokenizing
    finally:
        await tokenizing.stop()
        async with asyncio.timeout(60):  # killed, they take a moment
            await until(lambda: not processes())


def processes() -> dict[int, psutil.Process]:
    """Those that tokenize, by pid."""
    found = {}
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "tokenizing_process" in " ".join(each.cmdline()):
                found[each.pid] = each
    return found


async def until(holds: Callable[[], bool], pause_s: float = 0.01) -> None:
    while not holds():
        await asyncio.sleep(pause_s)


async def cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_text_becomes_the_ids_that_the_engine_makes_of_it(model: dict[str, str | int | float]) -> None:
    async def main() -> None:
        async with started(model) as tokenizing:
            for text in ("Hello, world.", "", "é" * 20, "\x00"):
                assert await tokenizing.prompt(text) == load_tokenizer("tiny-gpt2", 4096).encode(text).ids
            chat = await tokenizing.prompt([{"role": "user", "content": "Hi"}])
            assert chat == await tokenizing.prompt("user: Hi\nassistant:")

    run(main())


def test_without_a_tokenizer_a_prompt_is_text_and_there_is_no_process() -> None:
    async def main() -> None:
        async with started({"name": "none", "context": 64}) as tokenizing:
            assert await tokenizing.prompt("Hello") == "Hello"
            assert await tokenizing.prompt([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant:"
            assert processes() == {}

    run(main())


def test_as_many_are_worked_on_as_there_are_processes_and_others_wait(
    model: dict[str, str | int | float],
) -> None:
    async def main() -> None:
        async with started(model) as tokenizing:
            asked = [asyncio.create_task(tokenizing.prompt(SLOW)) for _ in range(PROCESSES + 3)]
            await until(lambda: tokenizing.waiting == 3)
            assert tokenizing.running == PROCESSES
            for each in asked[PROCESSES:]:
                await cancel(each)
            assert (tokenizing.running, tokenizing.waiting) == (PROCESSES, 0)
            for each in asked[:PROCESSES]:
                await cancel(each)
            await until(lambda: not tokenizing.running)

    run(main())


async def _cancelled(asked: Awaitable[Any], tokenizing: Tokenizing) -> None:
    task = asyncio.ensure_future(asked)
    await until(lambda: tokenizing.running == 1)
    await cancel(task)


async def _killed(asked: Awaitable[Any], tokenizing: Tokenizing) -> None:
    task = asyncio.ensure_future(asked)
    await until(lambda: tokenizing.running == 1)
    for process in processes().values():
        process.kill()
    with pytest.raises(Refused, match="the process that tokenized the prompt died"):
        await task


async def _too_long(asked: Awaitable[Any], tokenizing: Tokenizing) -> None:
    with pytest.raises(Refused, match=r"takes more than 0.2 s to tokenize"):
        await asked


@pytest.mark.parametrize("end", [_cancelled, _killed, _too_long])
def test_a_text_that_nobody_waits_for_ends_with_its_process_and_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, str | int | float],
    end: Callable[[Awaitable[Any], Tokenizing], Awaitable[None]],
) -> None:
    if end is _too_long:
        monkeypatch.setattr(module, "LONGEST_S", 0.2)

    async def main() -> None:
        async with started(model) as tokenizing:
            before = processes()
            await end(tokenizing.prompt(SLOW), tokenizing)
            await until(lambda: not tokenizing.running)
            monkeypatch.setattr(module, "LONGEST_S", 60)
            asked = [tokenizing.prompt("Hello") for _ in range(2 * PROCESSES)]
            assert len({tuple(each) for each in await asyncio.gather(*asked)}) == 1
            assert len(processes()) == PROCESSES
            assert processes() != before

    run(main())


def test_a_short_text_that_nobody_waits_for_costs_no_process(model: dict[str, str | int | float]) -> None:
    async def main() -> None:
        async with started(model) as tokenizing:
            before = processes()
            for _ in range(20):
                asked = asyncio.create_task(tokenizing.prompt("hello world " * 500))
                await until(lambda: tokenizing.running == 1, pause_s=0)
                for _ in range(5):  # until the process has it
                    await asyncio.sleep(0)
                await cancel(asked)
                await until(lambda: not tokenizing.running)
            assert processes() == before

    run(main())


def test_a_client_that_leaves_while_a_process_starts_does_not_keep_it_from_starting(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, str | int | float]
) -> None:
    monkeypatch.setattr(module, "MOMENT_S", 0)

    async def main() -> None:
        async with started(model) as tokenizing:
            for process in processes().values():
                process.kill()
            await until(lambda: not processes())
            for count in range(PROCESSES):
                asked = asyncio.create_task(tokenizing.prompt("Hello"))
                await until(lambda count=count: len(processes()) > count)  # type: ignore[misc]
                with suppress(Refused):  # it may have met the dead one first
                    await cancel(asked)
                await until(lambda: not tokenizing.running)
            assert await tokenizing.prompt("Hello") == await tokenizing.prompt("Hello")

    run(main())


def test_the_memory_of_a_long_text_is_free_again_behind_it(model: dict[str, str | int | float]) -> None:
    def memory() -> int:
        return sum(each.memory_info().rss for each in (psutil.Process(), *processes().values()))

    async def main() -> None:
        async with started(model) as tokenizing:
            before = memory()
            with pytest.raises(Refused, match="this model's context is 64 tokens, and the prompt has 66666"):
                await tokenizing.prompt("hello world " * 166_667)
            await until(lambda: memory() < before + (64 << 20))

    run(main())


def test_a_tokenizer_that_is_none_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    path = str(tmp_path / "tokenizer.json")

    async def main() -> None:
        with pytest.raises(RunFailed, match="can't load the tokenizer: "):
            async with started({"name": "none", "tokenizer": path, "context": 64}):
                pass

    run(main())
