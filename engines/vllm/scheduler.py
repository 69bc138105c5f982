"""vLLM's own schedulers, which record each step: classes that vLLM is given by name (scheduler_cls)."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from engines.vllm.steps import Steps


class _Recorded:
    """Calls what comes after it in the order of bases, one of vLLM's schedulers, and takes the time."""

    requests: dict[str, Any]  # vLLM's, unfinished ones

    def __init__(self, *given: Any, **named: Any) -> None:
        self.steps = Steps()
        super().__init__(*given, **named)

    def schedule(self, *given: Any, **named: Any) -> Any:
        began = perf_counter_ns()
        output = super().schedule(*given, **named)  # type: ignore[misc]
        self.steps.made(output, began, perf_counter_ns())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        began = perf_counter_ns()
        dropped = sum(name not in self.requests for name in scheduler_output.num_scheduled_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.steps.finished(dropped, began, perf_counter_ns())
        return outputs

    def _preempt_request(self, *given: Any, **named: Any) -> Any:
        self.steps.preempted += 1
        return super()._preempt_request(*given, **named)  # type: ignore[misc]


class RecordedScheduler(_Recorded, Scheduler):  # type: ignore[misc]
    pass


class RecordedAsyncScheduler(_Recorded, AsyncScheduler):  # type: ignore[misc]
    pass
