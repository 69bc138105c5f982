"""vLLM's AsyncLLM: scheduler and model in a process of their own, as behind its server.

AsyncLLM lives in an event loop on a thread of its own; the host's main thread hands requests over to it. All
events are sent from the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from threading import Thread
from time import perf_counter_ns
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from engines import api
from engines.processes import TERMINATE_S
from engines.vllm.base import Active, VllmEngine, error_of


class AsyncLLMEngine(VllmEngine):
    def open(self, config: Any) -> None:
        self.wake_fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._died = False
        self._names = count()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by request id; the loop's, as all below
        self._said: list[api.Event] = []
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="asyncio", daemon=True).start()
        self._llm = asyncio.run_coroutine_threadsafe(self._open(config), self._loop).result()

    async def _open(self, config: Any) -> AsyncLLM:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=not self.options.recorder)

    def submit(self, request: api.Request) -> None:
        self._loop.call_soon_threadsafe(self._begin, request, perf_counter_ns())

    def cancel(self, request: int) -> None:
        self._loop.call_soon_threadsafe(self._give_up, request)

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(None):
            if self._died:
                raise api.EngineError("vLLM's engine core died")

    def stop(self) -> None:
        llm = getattr(self, "_llm", None)
        if llm is not None:
            llm.shutdown(timeout=TERMINATE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        super().stop()

    # -- on the loop ---------------------------------------------------------------------------------------

    def _begin(self, request: api.Request, accepted_ns: int) -> None:
        active = Active(request, accepted_ns)
        task = self._tasks[request.id] = self._loop.create_task(self._serve(active))
        task.add_done_callback(partial(self._ended, active))

    def _give_up(self, request: int) -> None:
        task = self._tasks.get(request)
        if task is not None:
            task.cancel()

    async def _serve(self, active: Active) -> None:
        request, name = active.request, str(next(self._names))
        try:
            async for output in self._llm.generate(self.prompt(request), self.sampling(request), name):
                self._say(active.events(output))
        except EngineDeadError:
            self._died = True
            os.eventfd_write(self.wake_fd, 1)
        except Exception as error:  # whatever it is, the request must end
            self._say([error_of(request.id, error)])

    def _ended(self, active: Active, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step never gets to say so itself."""
        if self._tasks.get(active.request.id) is task:
            del self._tasks[active.request.id]
        if task.cancelled():
            self._say([active.finish("cancelled")])

    def _say(self, events: Sequence[api.Event]) -> None:
        """Sent once the loop has run all that is ready: one message per step, not per request."""
        if events and not self._said:
            self._loop.call_soon(self._send)
        self._said += events

    def _send(self) -> None:
        said, self._said = self._said, []
        self.events.send(said)
