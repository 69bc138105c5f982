"""vLLM's AsyncLLM: scheduler and model in a process of their own, as behind its server.

AsyncLLM lives in an event loop on a thread of its own; the host's main thread hands requests over to it. All
events are sent from the loop. While turns last, the main thread also lets the core through its gate, step by
step (gate.py).
"""

from __future__ import annotations

import asyncio
import os
import select
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from threading import Thread
from time import perf_counter_ns
from typing import Any

import msgspec
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from overlap_bench.engines import api
from overlap_bench.engines.processes import TERMINATE_S
from overlap_bench.engines.steps import beside, processed, ranges
from overlap_bench.engines.vllm import CORE
from overlap_bench.engines.vllm.base import Active, VllmEngine, error_of, on_cpu
from overlap_bench.engines.vllm.cores import leave_compute_core
from overlap_bench.engines.vllm.gate import FINISH, GO, LOOK, Asked, Gate, died

HOPS = 4  # of the loop, from an output in a request's queue to its event on its way


class AsyncLLMEngine(VllmEngine):
    recorded = "Gated"

    def open(self, config: Any) -> None:
        self.wake_fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._died = False
        self._names = count()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by request id; the loop's, as all below
        self._said: list[api.Event] = []
        self._gate = Gate()
        self._at_end.callback(self._gate.close)
        self._turning = False
        self._taken = 0  # requests
        self._over = self._refused = 0  # of them; the loop's
        self._ends = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outputs = 0  # of requests, which the loop has seen
        self._processing_ns = 0  # them, in this round
        self._spans: list[tuple[int, int, int]] = []  # of this round: see steps.processed
        self._delay = api.Delay()
        self._seen = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="asyncio", daemon=True)
        self._thread.start()
        self._llm = asyncio.run_coroutine_threadsafe(self._open(config), self._loop).result()
        self._at_end.callback(self._loop.call_soon_threadsafe, self._loop.stop)
        self._at_end.callback(self._llm.shutdown, timeout=TERMINATE_S)  # which comes first
        if self.options.recorder:
            self._gate.open()
        leave_compute_core()

    async def _open(self, config: Any) -> AsyncLLM:
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=not self.options.recorder)
        process = llm.output_processor.process_outputs

        def process_counted(outputs: list[Any], *given: Any, **named: Any) -> Any:
            began = perf_counter_ns()
            done = process(outputs, *given, **named)
            self._delay.spend("output-process")
            self._outputs += len(outputs)
            ended = perf_counter_ns()
            self._processing_ns += ended - began
            self._spans.append((self._outputs, began, ended))
            self._seen.set()
            return done

        llm.output_processor.process_outputs = process_counted
        return llm

    def arguments(self) -> AsyncEngineArgs:
        arguments = super().arguments()
        if on_cpu() and not self.options.pace:
            arguments.worker_extension_cls = "overlap_bench.engines.vllm.worker.Sleeping"
            if CORE in os.environ:
                os.environ["OMP_NUM_THREADS"] = "1"
        else:
            os.environ.pop(CORE, None)  # nothing computes there
        return arguments

    def submit(self, request: api.Request) -> None:
        self._taken += 1
        self._loop.call_soon_threadsafe(self._begin, request, perf_counter_ns())

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(0 if self._turning and self._busy else None):
            self._check()
            if self._turning and self._asks():
                self._gate.let(GO)
                self._asks()  # again: the step is over

    @property
    def _busy(self) -> bool:
        return self._taken > self._over

    def _asks(self) -> Asked | None:
        """What the core asks, once it asks to schedule a step and has every request. None where no request is
        left, and it will not ask."""
        while self._gate.asked is None and self._busy:
            ready, _, _ = select.select([self._gate.fileno(), self._ends, self.wake_fd], [], [])
            if self._ends in ready:
                os.eventfd_read(self._ends)
            self._check()
            if self._gate.fileno() in ready and self._gate.hear().requests < self._taken - self._refused:
                self._gate.let(LOOK)
        return self._gate.asked if self._busy else None

    def _check(self) -> None:
        if self._died:
            raise died()

    def begin_turns(self) -> None:
        self._gate.begin()
        self._turning = True

    def end_turns(self) -> None:
        self._turning = False
        self._gate.end()

    def delay(self, phase: str, ns: int) -> int:
        here = phase == "output-process"  # all else is the core's
        spent = self._delay.put(phase, ns if here else 0)
        return spent + self._gate.delay(phase, 0 if here else ns)

    def drain(self) -> None:
        while (asked := self._asks()) is not None and asked.begun:
            self._gate.let(FINISH)
        if asked is None:
            self._gate.finish()
        outputs = 0 if asked is None else asked.outputs
        asyncio.run_coroutine_threadsafe(self._saw(outputs), self._loop).result()

    async def _saw(self, outputs: int) -> None:
        """Until the loop has seen so many outputs, and has sent what there was to say of them."""
        while self._outputs < outputs:
            self._seen.clear()
            await self._seen.wait()
        for _ in range(HOPS):
            await asyncio.sleep(0)

    def begin_round(self) -> None:
        self._spans = []
        self._processing_ns = 0
        if self.options.recorder:
            self._gate.clear()

    def begin_profile(self, steps: int) -> None:
        self.check_profile()
        self._gate.begin_profile(steps)
        self._spans = []
        self._processing_ns = 0

    def collect(self) -> api.RoundRecord:
        if not self.options.recorder:
            return api.RoundRecord()
        record, outputs = self._gate.collect()
        record = msgspec.structs.replace(
            record, counters={**record.counters, "output_processing_ns": self._processing_ns}
        )
        thread, name = self._thread.native_id or 0, api.PHASES.index("output")
        if record.beside:  # a round with delays
            mine = beside("output-process", thread, self._thread.name, self._spans)
            record = msgspec.structs.replace(record, beside=[*record.beside, mine])
        if record.profile is None:
            return record
        assert record.steps is not None
        found = processed(self._spans, array("q", record.steps.data), outputs)
        host = ranges("output", {thread: self._thread.name}, ((thread, name, *each) for each in found))
        profile = msgspec.structs.replace(record.profile, hosts=[*record.profile.hosts, host])
        return msgspec.structs.replace(record, profile=profile)

    # -- on the loop ---------------------------------------------------------------------------------------

    def _begin(self, request: api.Request, accepted_ns: int) -> None:
        active = self.active(request, accepted_ns)
        task = self._tasks[request.id] = self._loop.create_task(self._serve(active))
        task.add_done_callback(partial(self._ended, active))

    async def _serve(self, active: Active) -> None:
        request, name = active.request, str(next(self._names))
        try:
            async for output in self._llm.generate(self.prompt(request), self.sampling(request), name):
                self._say(active.events(output))
        except EngineDeadError:
            self._died = True
            os.eventfd_write(self.wake_fd, 1)
        except Exception as error:  # whatever it is, the request must end
            self._refused += 1
            self._say([error_of(request.id, error)])

    def _ended(self, active: Active, task: asyncio.Task[None]) -> None:
        """A task that vLLM cancels does not say so itself."""
        self._over += 1
        os.eventfd_write(self._ends, 1)
        if self._tasks.get(active.request.id) is task:
            del self._tasks[active.request.id]
        if task.cancelled():
            self._refused += 1
            self._say([active.finish("cancelled")])

    def _say(self, events: Sequence[api.Event]) -> None:
        """Sent once the loop has run all that is ready: one message per step, not per request."""
        if events and not self._said:
            self._loop.call_soon(self._send)
        self._said += events

    def _send(self) -> None:
        said, self._said = self._said, []
        self.events.send(said)
