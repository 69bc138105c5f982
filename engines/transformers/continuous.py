"""transformers' continuous batching: what generate_batch() runs on, kept running, with streaming.

The library's manager has a thread of its own, which schedules, computes, and hands out each step's tokens;
the engine's main thread sleeps until it does, and turns them into events. On the CPU the two share the GIL,
as with anyone who reads the manager's output.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from itertools import count
from typing import Any

from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from overlap_bench.engines import api
from overlap_bench.engines.devices.loading import one_line
from overlap_bench.engines.output import Produced
from overlap_bench.engines.requests import Taken
from overlap_bench.engines.transformers.base import USED, TransformersEngine


class Outputs(OutputRouter):  # type: ignore[misc]  # transformers is not typed
    """Where the manager's thread leaves each step's outputs. It wakes the main thread once a step, where the
    library's own queue would wake its reader once a token.

    What is put is there before the descriptor turns readable: a reader that clears it first misses nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrived: deque[list[GenerationOutput]] = deque()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._arrived.append(outputs)
        os.eventfd_write(self.wake_fd, 1)

    def take(self) -> list[GenerationOutput]:
        """Everything that came since."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        taken: list[GenerationOutput] = []
        while self._arrived:
            taken += self._arrived.popleft()
        return taken


class ContinuousEngine(TransformersEngine):
    """A page of the library's cache is an engine's KV block; a batch holds prefill_max_tokens tokens."""

    used = (*USED, "block_size", "num_blocks", "prefix_cache")

    def prepare(self) -> None:
        options = self.options
        wanted = {name for name in ("async_batching", "cuda_graph") if self.toggles[name] == "on"}
        if wanted and self.device.type != "cuda":
            raise api.BadSetting(f"{min(wanted)}=on needs CUDA, and this is the {self.device.type.upper()}")
        blocks = options.max_batch_size * -(-options.max_context // options.block_size)
        try:
            self._manager = self.model.init_continuous_batching(
                continuous_batching_config=ContinuousBatchingConfig(
                    num_blocks=options.num_blocks or blocks,
                    max_batch_tokens=max(options.prefill_max_tokens, options.max_batch_size),
                    max_requests_per_batch=options.max_batch_size,
                    allow_block_sharing=options.prefix_cache,
                    use_async_batching="async_batching" in wanted,
                    use_cuda_graph="cuda_graph" in wanted,
                    **self._by_version(),
                )
            )
            self._outputs = self._manager.output_router = Outputs()
            self._manager.warmup()
        except (MemoryError, ValueError) as error:
            raise api.BadSetting(f"transformers' continuous batching: {one_line(error)}") from error
        self.wake_fd = self._outputs.wake_fd
        self._manager.current_batch = 0
        self._manager.start()
        self._names = count()  # clients reuse ids, and old outputs may still be on their way
        self._running: dict[str, Taken] = {}  # by the manager's name for it
        self._named: dict[int, str] = {}  # by request id

    def _by_version(self) -> dict[str, Any]:
        """Settings that transformers 5.17 and 5.18 name differently, or lack. With float32, keeps the library
        from flash attention, which it takes where it finds one: none computes in float32."""
        known = {each.name for each in fields(ContinuousBatchingConfig)}
        settings: dict[str, Any] = {
            "page_size" if "page_size" in known else "block_size": self.options.block_size
        }
        if self.options.dtype == "float32":
            if "auto_switch_to_flash" in known:
                settings["auto_switch_to_flash"] = False
            else:
                self.model.set_attn_implementation(f"paged|{self.model.config._attn_implementation}")
        return settings

    def queue(self, active: Taken) -> None:
        name = str(next(self._names))
        self._running[name] = active
        self._named[active.request.id] = name
        added = self._manager.add_request(
            active.prompt,
            request_id=name,
            max_new_tokens=active.request.max_new_tokens,
            streaming=True,
            record_timestamps=True,
            eos_token_id=sorted(self.eos) if active.request.stop_on_eos else -1,
        )
        if added is None:
            raise self._ended()

    def give_up(self, request: int) -> Taken | None:
        name = self._named.pop(request, None)
        if name is None:
            return None
        self._manager.cancel_request(name)
        return self._running.pop(name)

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(None):
            produced: list[Produced] = []
            for output in self._outputs.take():
                active = self._running.get(output.request_id)
                if active is not None:
                    produced += self._said(output, active)
            self.output.process(produced)
            if not self._manager.is_running():
                raise self._ended()

    def _said(self, output: GenerationOutput, active: Taken) -> list[Produced]:
        """The tokens that a request's output has beyond the previous one's."""
        if output.error is not None:
            self._forget(output.request_id, active)
            self._events.send([api.Error(active.request.id, f"transformers: {output.error}")])
            return []
        if not active.count:
            self.admit(active, round(output.lifespan[0] * 1e9))
        tokens = output.generated_tokens[active.count :]
        assert output.timestamps is not None
        stamps = output.timestamps[len(output.timestamps) - len(tokens) :]  # a preempted one lost the rest
        produced = [
            self.produce(active, token, round(stamp * 1e9))
            for token, stamp in zip(tokens, stamps, strict=True)
        ]
        if output.is_finished():
            self._forget(output.request_id, active)
        return produced

    def _ended(self) -> api.EngineError:
        error = self._manager.background_thread_status.fatal_error
        return api.EngineError(f"transformers' continuous batching ended: {one_line(error)}")

    def _forget(self, name: str, active: Taken) -> None:
        del self._running[name]
        if self._named.get(active.request.id) == name:
            del self._named[active.request.id]

    def begin_round(self) -> None:
        super().begin_round()
        self._steps_before = self._manager.current_batch

    def collect(self) -> api.RoundRecord:
        self.counters["steps"] = self._manager.current_batch - self._steps_before
        return super().collect()

    def stop(self) -> None:
        manager = getattr(self, "_manager", None)
        if manager is not None:
            manager.stop(block=True, timeout=5, hard_stop=True)
            manager.destroy()
            self.wake_fd = None
            os.close(self._outputs.wake_fd)
            del self._manager
