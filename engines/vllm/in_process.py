"""vLLM's scheduler and model in the host's own process, one step after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from time import perf_counter_ns
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from overlap_bench.engines import api
from overlap_bench.engines.vllm import BIND
from overlap_bench.engines.vllm.base import Active, VllmEngine, error_of
from overlap_bench.engines.vllm.steps import finish_begun


class InProcessEngine(VllmEngine):
    recorded = "Recorded"

    def open(self, config: Any) -> None:
        self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=not self.options.recorder)
        self._core = self._llm.engine_core.engine_core
        # On a CPU vLLM binds the threads of a worker process, and there is none. Both arms compute on one
        # core: where each goes by itself, what else runs on a core slows one of them for seconds.
        core = str(max(os.sched_getaffinity(0))) if self.options.pace else os.environ[BIND]
        if config.device_config.device_type == "cpu" and core.isdecimal():
            os.sched_setaffinity(0, {int(core)})
        self._names = count()
        self._active: dict[str, Active] = {}  # by vLLM's name for it

    def submit(self, request: api.Request) -> None:
        accepted, name = perf_counter_ns(), str(next(self._names))
        try:
            self._llm.add_request(name, self.prompt(request), self.sampling(request))
        except ValueError as error:
            self.events.send([error_of(request.id, error)])
            return
        self._active[name] = self.active(request, accepted)

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(0 if self._active else None):
            if self._active:
                self._step()

    def drain(self) -> None:
        finish_begun(self._core, self._step, PauseState)

    def begin_round(self) -> None:
        self.drain()  # of a step that was scheduled ahead, and whose requests have ended
        if self.options.recorder:
            self._core.scheduler.steps.clear()

    def delay(self, phase: str, ns: int) -> int:
        return int(self._core.scheduler.steps.put_delay(phase, ns))

    def begin_profile(self, steps: int) -> None:
        self.check_profile()
        self.drain()
        self._core.scheduler.steps.begin_profile(steps)

    def collect(self) -> api.RoundRecord:
        return self._core.scheduler.steps.record() if self.options.recorder else api.RoundRecord()

    def _step(self) -> None:
        said: list[api.Event] = []
        for output in self._llm.step():
            active = self._active.get(output.request_id)
            if active is None:
                continue
            said += active.events(output)
            if output.finished:
                del self._active[output.request_id]
        if said:
            self.events.send(said)
        if self.options.recorder:
            self._core.scheduler.steps.said()
