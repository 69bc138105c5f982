"""What vLLM's scheduler says of each step, as the records of a round. Nothing here needs vLLM.

A step of vLLM, as far as its scheduler sees it: `schedule` makes it, the model runs, and with its tokens on
the host `update_from_output` appends them. What lies between the two is what vLLM tells of the model's time.
On a CPU that is the model's own; on a card it is that, and waiting for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from overlap_bench.engines import api

if TYPE_CHECKING:
    from overlap_bench.engines.vllm.paced.device import Program

PREFILL, DECODE, MIXED = (api.STEP_KINDS.index(kind) for kind in ("prefill", "decode", "mixed"))
NOT_THERE = dict.fromkeys(api.STEP_COLUMNS, -1)


def finish_begun(core: Any, step: Callable[[], object], states: Any) -> None:
    """Have vLLM's `core` finish the steps that are in flight, where it schedules ahead. While it is paused it
    schedules none, and `step` waits for what there is. `states`: vLLM's PauseState."""
    if not core.batch_queue:
        return
    core.scheduler.set_pause_state(states.PAUSED_ALL)
    try:
        while core.batch_queue:
            step()
    finally:
        core.scheduler.set_pause_state(states.UNPAUSED)


class Steps:
    """The steps of a round. They are told apart by the order in which they are made, which is that in which
    they end."""

    def __init__(self) -> None:
        self.preempted = 0  # requests, since the last step was made
        self.planted_ns = 0  # that a delay of a known size took (--plant)
        self._made: deque[dict[str, int]] = deque()  # and not finished
        self._number = 0
        self._rows = array("q")
        self._programs = array("q")
        self._on_host_ns = 0  # when the tokens of the step before were

    @property
    def begun(self) -> int:
        """How many are in flight, those apart in which nothing runs."""
        return sum(map(bool, self._made))

    def made(self, output: Any, began_ns: int, ended_ns: int) -> None:
        """A step was scheduled: `output` is vLLM's SchedulerOutput."""
        batch = len(output.num_scheduled_tokens)
        if not batch:  # nothing to run: what has finished is told to the workers
            self._made.append({})
            return
        cached = output.scheduled_cached_reqs
        prefills = len(output.scheduled_new_reqs) + sum(
            not tokens or name in cached.resumed_req_ids
            for name, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True)
        )
        self._made.append(
            {
                "step": self._number,
                "kind": PREFILL if prefills == batch else MIXED if prefills else DECODE,
                "batch": batch,
                "tokens": output.total_num_scheduled_tokens,
                "preempted": self.preempted,
                "schedule.start": began_ns,
                "schedule.end": ended_ns,
            }
        )
        self._number += 1
        self.preempted = 0

    def finished(self, dropped: int, began_ns: int, ended_ns: int, program: Program | None = None) -> None:
        """The tokens of the oldest step were on the host, and are appended; those of `dropped` requests were
        not wanted any more. `program`: what a paced device knows of it."""
        facts = self._made.popleft()
        if not facts:
            return
        if program is None:
            # A device runs steps in order: a step scheduled ahead began when the one before it had ended.
            span = max(facts["schedule.end"], self._on_host_ns), began_ns
        else:
            span = program.begin_ns, program.end_ns
            facts |= {
                "metadata.start": program.prepare_ns,
                "metadata.end": program.launch_ns,
                "launch.start": program.launch_ns,
                "launch.end": program.launched_ns,
                "wait.copy_done.start": program.wait_ns,
                "wait.copy_done.end": program.woke_ns,
            }
        self._programs.extend((0, facts["step"], *span))
        self._on_host_ns = began_ns
        facts |= {"dropped": dropped, "append.start": began_ns, "append.end": ended_ns}
        self._rows.extend((NOT_THERE | facts).values())

    def said(self) -> None:
        """What the latest finished step gave is detokenized and sent."""
        if self._rows:
            row = len(self._rows) - len(api.STEP_COLUMNS)
            start, end = (row + api.STEP_COLUMNS.index(name) for name in ("output.start", "output.end"))
            if self._rows[start] == -1:
                self._rows[start] = self._rows[row + api.STEP_COLUMNS.index("append.end")]
                self._rows[end] = perf_counter_ns()

    def clear(self) -> None:
        """A round begins; the engine is idle."""
        del self._rows[:], self._programs[:]
        self._number = self.preempted = self.planted_ns = 0

    def record(self) -> api.RoundRecord:
        rows = len(self._rows) // len(api.STEP_COLUMNS)
        return api.RoundRecord(
            steps=api.StepTable(list(api.STEP_COLUMNS), rows, self._rows.tobytes()),
            device_work=api.DeviceWork(rows, self._programs.tobytes()),
            counters={"planted_host_ns": self.planted_ns} if self.planted_ns else {},
        )
