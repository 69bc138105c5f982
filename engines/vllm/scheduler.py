"""vLLM's own schedulers, which record each step: classes that vLLM is given by name (scheduler_cls)."""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core

from overlap_bench.engines.api import PHASES
from overlap_bench.engines.delay import spin
from overlap_bench.engines.processes import skip_teardown
from overlap_bench.engines.vllm import PLANT, paced, toggles
from overlap_bench.engines.vllm.cores import leave_compute_core
from overlap_bench.engines.vllm.gate import FINISH, GO, Asked, Core
from overlap_bench.engines.vllm.steps import Steps, nvtx_ranges

SCHEDULE, APPEND = PHASES.index("schedule"), PHASES.index("append")


class _Recorded:
    """Calls what comes after it in the order of bases, one of vLLM's schedulers, and takes the time."""

    requests: dict[str, Any]  # vLLM's, unfinished ones

    def __init__(self, *given: Any, **named: Any) -> None:
        self.steps = Steps()
        planted = os.environ.get(PLANT)
        self._delay_ns = None if planted is None else int(planted)
        self.device = paced.own_device()
        self._ranges = nvtx_ranges()
        if self.device is not None:
            self.device.ranges, self.device.delay = self._ranges, self.steps.delay
            self.steps.ledger = self.device.asked
        self._outputs = 0  # of requests, so far
        self._asked = False  # whether what was switched is in force
        super().__init__(*given, **named)

    def add_request(self, *given: Any, **named: Any) -> Any:
        added = super().add_request(*given, **named)  # type: ignore[misc]
        if not self._asked:
            toggles.check_in_force(toggles.told(), self)
            self._asked = True
        return added

    def schedule(self, *given: Any, **named: Any) -> Any:
        if self.device is not None:
            self.device.step = self.steps.next
        if self._ranges is not None:
            self._ranges.push(SCHEDULE, self.steps.next)
        began = perf_counter_ns()
        output = super().schedule(*given, **named)  # type: ignore[misc]
        if self._delay_ns is not None and output.total_num_scheduled_tokens:
            self.steps.planted_ns += spin(self._delay_ns)
        if output.total_num_scheduled_tokens:
            self.steps.delay.spend("schedule")
        self.steps.made(output, began, perf_counter_ns())
        if self._ranges is not None:
            self._ranges.pop()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._ranges is not None:
            self._ranges.push(APPEND, self.steps.oldest)
        began = perf_counter_ns()
        dropped = sum(name not in self.requests for name in scheduler_output.num_scheduled_tokens)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        program = None
        if self.device is not None and scheduler_output.total_num_scheduled_tokens:
            program = self.device.programs.popleft()
        self._outputs += sum(len(each.outputs) for each in outputs.values())
        given = -1
        if drafts := scheduler_output.scheduled_spec_decode_tokens:
            self.steps.verified(drafts, model_runner_output)
            given = sum(len(one.new_token_ids) for each in outputs.values() for one in each.outputs)
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.delay.spend("append")
        self.steps.finished(dropped, began, perf_counter_ns(), program, self._outputs, given)
        if self._ranges is not None:
            self._ranges.pop()
        return outputs

    def _preempt_request(self, *given: Any, **named: Any) -> Any:
        self.steps.preempted += 1
        return super()._preempt_request(*given, **named)  # type: ignore[misc]


class RecordedScheduler(_Recorded, Scheduler):  # type: ignore[misc]
    pass


class RecordedAsyncScheduler(_Recorded, AsyncScheduler):  # type: ignore[misc]
    pass


def record_sending(steps: Steps) -> None:
    """Have vLLM's core say when it serializes and sends what a step gave. Its thread for that starts after
    its scheduler is made, and looks up both names then. A release that sends by other names goes unrecorded:
    without it a step is what it was."""
    send = getattr(core.EngineCoreProc, "_send_msg_tracking_payload", None)
    if send is None or not hasattr(core.MsgpackEncoder, "encode_into"):
        return
    began = 0

    class Encoder(core.MsgpackEncoder):  # type: ignore[misc]
        def encode_into(self, outputs: Any, *given: Any) -> Any:
            nonlocal began
            began = perf_counter_ns()
            steps.sending(len(outputs.outputs))
            return super().encode_into(outputs, *given)

    def recorded(*given: Any) -> Any:
        tracker = send(*given)
        steps.sent(began)
        return tracker

    core.MsgpackEncoder = Encoder
    core.EngineCoreProc._send_msg_tracking_payload = staticmethod(recorded)


class _Gated(_Recorded):
    """The scheduler of a core in a process of its own: it schedules a step once the host has let it
    (gate.py)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        leave_compute_core()
        skip_teardown()  # after vLLM's own end of its core, which would else be killed for its slowness
        self._core = Core(self.steps)
        record_sending(self.steps)
        self._requests = 0  # so far
        self._finishing = False

    def add_request(self, *given: Any, **named: Any) -> Any:
        self._requests += 1
        return super().add_request(*given, **named)

    def schedule(self, *given: Any, **named: Any) -> Any:
        if not self._finishing:
            word = self._core.ask(Asked(self._requests, self._outputs, self.steps.begun))
            if word == GO:
                return super().schedule(*given, **named)
            self._finishing = word == FINISH and self.steps.begun > 0
        self._pause(PauseState.PAUSED_ALL)  # it schedules nothing, so vLLM waits for what is begun
        output = super().schedule(*given, **named)
        if not self._finishing:  # vLLM looks for requests now, and schedules again
            self._pause(PauseState.UNPAUSED)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._finishing and not self.steps.begun:
            self._finishing = False
            self._pause(PauseState.UNPAUSED)
        return outputs

    def _pause(self, state: PauseState) -> None:
        self.set_pause_state(state)  # type: ignore[attr-defined]


class GatedScheduler(_Gated, Scheduler):  # type: ignore[misc]
    pass


class GatedAsyncScheduler(_Gated, AsyncScheduler):  # type: ignore[misc]
    pass
