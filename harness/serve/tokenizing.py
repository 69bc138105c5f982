"""Text to token ids beside the engine's steps and beside the server's streams: in a few processes, one prompt
at a time each.

A prompt waits for a free one. If its client hangs up meanwhile, it is forgotten. If it is worked on by then,
the process has a moment to be done; after that it is killed and another started, as where it dies or takes
too long. So neither a client nor the end of the server waits for a text that nobody wants any more.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from harness.run.hosts import RunFailed, environment
from harness.serve.parsing import Refused
from harness.serve.prompting import may_have_template, plain
from harness.serve.tokenizing_process import LENGTH, Answer, Failed, Question, Ready, Refusal, Task, frame

PROCESSES = 2
# What is nobody's any more may take this long; a new process takes about as long to start.
MOMENT_S = 0.5
LONGEST_S = 60.0  # 16 MB take a third of it


class Died(Exception):
    """A process ended by itself."""


class Tokenizing:
    """For one model, as Description.model has it. `start` it in an event loop, `stop` it at the end. Where
    there is neither a tokenizer nor a template, prompts are left as they are, and no process is started."""

    def __init__(self, model: Mapping[str, str | int | float]) -> None:
        self.running = self.waiting = 0  # prompts
        self.most_bytes: int | None = None  # of a text that may fit
        self.has_template = False
        self._model = dict(model)
        self._workers: list[_Worker] = []
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

    async def start(self) -> None:
        """Raises RunFailed where the tokenizer can't be loaded."""
        if not (self._model.get("tokenizer") or may_have_template(str(self._model["name"]))):
            return
        task = msgspec.json.encode(Task(self._model, os.getpid())).decode()
        self._workers = [_Worker(task) for _ in range(PROCESSES)]
        ready, *_ = await asyncio.gather(*(worker.ready() for worker in self._workers))
        self.most_bytes, self.has_template = ready.most_bytes, ready.has_template
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def stop(self) -> None:
        """End all processes, whatever they are at."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def prompt(self, question: Question) -> str | list[int]:
        """Token ids of a text or a chat, no more than the context has room for; a text where the engine names
        no tokenizer. Raises Refused."""
        if not self._workers:
            return question if isinstance(question, str) else plain(question)
        self.waiting += 1
        try:
            worker = await self._idle.get()
        finally:
            self.waiting -= 1
        self.running += 1
        working = asyncio.create_task(worker.ask(question))

        def done(_: asyncio.Task[str | list[int]]) -> None:
            self.running -= 1
            self._idle.put_nowait(worker)

        working.add_done_callback(done)
        working.add_done_callback(_look_at)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(MOMENT_S, working.cancel)
            raise


def _look_at(task: asyncio.Task[Any]) -> None:
    """At how it ended: where nobody else does, asyncio prints it."""
    if not task.cancelled():
        task.exception()


class _Worker:
    """One process, and the next where it was killed."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._process: Process | None = None
        self._stopped = False
        self._start_anew()

    async def ready(self) -> Ready:
        """Once there is a process that waits for a question."""
        if self._starting.done() and self._process is not None and self._process.returncode is not None:
            self._start_anew()  # something killed it while it was idle
        # A client that hangs up meanwhile does not put an end to it: it would never start.
        return await asyncio.shield(self._starting)

    async def _start(self) -> Ready:
        command = (sys.executable, "-m", "harness.serve.tokenizing_process", self._task)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=environment({}), start_new_session=True
        )
        try:
            said = await self._hear()
        except Died:
            said = Failed("its process died")
        if isinstance(said, Ready):
            return said
        raise RunFailed(f"can't load the tokenizer: {said.message if isinstance(said, Failed) else said}")

    async def ask(self, question: Question) -> str | list[int]:
        """Its prompt. Raises Refused. Cancelled, it ends the process."""
        try:
            await self.ready()
        except RunFailed as error:
            self._start_anew()
            raise Refused(500, str(error)) from error
        try:
            async with asyncio.timeout(LONGEST_S):
                answer = await self._exchange(question)
        except BaseException as error:  # whatever it is, the process is in the middle of something
            self._start_anew()
            match error:
                case TimeoutError():
                    message = f"the prompt takes more than {LONGEST_S:g} s to tokenize"
                    raise Refused(400, message) from None
                case Died():
                    raise Refused(500, "the process that tokenized the prompt died") from None
            raise
        if isinstance(answer, str | list):
            return answer
        assert isinstance(answer, Refusal)
        raise Refused(answer.status, answer.message, answer.code)

    async def _exchange(self, question: Question) -> Answer:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame(question))
            await self._process.stdin.drain()
        except OSError as error:
            raise Died from error
        return await self._hear()

    async def _hear(self) -> Answer:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            content = await self._process.stdout.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise Died from error
        answer: Answer = msgspec.msgpack.decode(content, type=Answer)
        return answer

    def _start_anew(self) -> None:
        self._kill()
        if not self._stopped:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_look_at)

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        self._stopped = True
        self._starting.cancel()
        self._kill()
        if self._process is not None:
            await self._process.wait()
