"""What SGLang's scheduler is told to do besides, whichever its release."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from overlap_bench.engines.delay import spin
from overlap_bench.engines.steps import DECODE, PREFILL, Steps

if TYPE_CHECKING:
    from overlap_bench.engines.paced.device import Device
    from overlap_bench.engines.sglang_base.engine import SglangEngine


class Recorded:
    """Before SGLang's scheduler: it asks the engine for requests and tells it of them, records each step, and
    can be stopped between two."""

    running_batch: Any
    last_batch: Any
    waiting_queue: Any
    chunked_req: Any

    def __init__(self, engine: SglangEngine, card: Device, *arguments: Any) -> None:
        self.engine, self.card, self.steps = engine, card, Steps()
        card.delay = self.steps.delay
        self._began_ns = 0
        self._dropped = 0  # requests of the step that is processed, which ended before it
        self._parking = False
        super().__init__(*arguments)

    @property
    def is_left(self) -> bool:
        """Whether it has something to do, if nobody asks for more."""
        return bool(self.last_batch or self.waiting_queue or self.chunked_req or self.running_batch.reqs)

    def get_next_batch_to_run(self, *given: Any, **named: Any) -> Any:
        self._began_ns = perf_counter_ns()
        return super().get_next_batch_to_run(*given, **named)  # type: ignore[misc]

    def scheduled(self) -> None:
        """Take as long as was asked for."""
        if self.engine.options.plant_at:
            self.steps.planted_ns += spin(self.engine.options.plant_ns)
        self.steps.delay.spend("schedule")

    def add(self, batch: Any) -> None:
        """Record that it was scheduled."""
        decode = batch.forward_mode.is_decode()
        kind, tokens = (DECODE, len(batch.reqs)) if decode else (PREFILL, batch.extend_num_tokens)
        self.steps.add(kind, len(batch.reqs), tokens, self._began_ns, perf_counter_ns())

    def count_dropped(self, batch: Any) -> None:
        self._dropped = sum(each.finished() or each.is_retracted for each in batch.reqs)
