"""What a step is made of. In which order, the two loops of toggle schedule say.

A step's way: scheduler.schedule -> h2d.stage -> launch.submit -> Forward.run (metadata in, model, ids out) ->
d2h.finish -> scheduler.append -> output. The future map: the host asks for a token it does not know by its
request's slot (batch._newest_tokens); the device looks it up (model._forward) and writes the next one
(model._sample). Where a model spans several devices, the other ranks are told of the step (ranks.send) ahead
of h2d.stage, and go from there to a Forward.run of their own (rank_process.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import msgspec

from overlap_bench.engines.api import STAMPS, Finish
from overlap_bench.engines.output import Opening, Produced
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.plant import Plant
from overlap_bench.engines.overlap.programs import Mixed
from overlap_bench.engines.overlap.ranks import OtherRanks
from overlap_bench.engines.overlap.recorder import (
    APPEND,
    METADATA,
    OUTPUT,
    RECV,
    SCHEDULE,
    WAIT_COPY_DONE,
    WAIT_LAUNCH_DONE,
    Recorder,
)
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.scheduler import Scheduler
from overlap_bench.engines.overlap.step import Step
from overlap_bench.engines.overlap.toggles.d2h import DeviceToHost
from overlap_bench.engines.overlap.toggles.h2d import HostToDevice
from overlap_bench.engines.overlap.toggles.launch import Launch
from overlap_bench.engines.overlap.toggles.output import Output

Pump = Callable[[float | None], bool]
NO_STEP = -1


@dataclass(slots=True)
class Loop:
    """What a loop works with, and the helpers that both loops share. All on the scheduler's thread."""

    scheduler: Scheduler
    h2d: HostToDevice
    d2h: DeviceToHost
    launch: Launch
    # Toggle prefill: of a step in flight and the next one, what is left to process once that one is launched.
    before_launch: Callable[[Loop, Step | None, Step | None], Step | None]
    # Toggle sync: what is waited for before a step is processed.
    wait_and_process: Callable[[Loop, Step, Step | None], None]
    output: Output
    recorder: Recorder
    counters: dict[str, int]
    eos: frozenset[int]
    plant: Plant
    ranks: OtherRanks | None = None  # where the model spans several devices
    next_step: int = 0
    in_flight: Step | None = None  # under overlap: launched, and not processed yet

    def receive(self, pump: Pump, wait: bool) -> bool:
        """Take in new requests; block for one only when there is nothing else to do. That wait is not host
        work, and goes into no step's record."""
        if wait:
            return pump(None)
        recorder = self.recorder  # kept: a round that begins in the pump may replace it
        began = recorder.begin(RECV, self.next_step)
        go_on = pump(0)
        recorder.end(RECV, self.next_step, began)
        return go_on

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do but to wait for a message."""
        return self.in_flight is None and self.scheduler.idle

    def schedule(self) -> Step | None:
        """The next step with its metadata staged, or None."""
        number = self.next_step
        began = self.recorder.begin(SCHEDULE, number)
        batch = self.scheduler.schedule()
        if batch is None:
            self.recorder.end(SCHEDULE, NO_STEP, began)
            if self.in_flight is None:  # else it comes once that is processed
                self.recorder.forget(RECV, number)  # the step may come much later, after a wait
            return None
        self.next_step += 1
        kind, tokens = batch.program.kind, batch.program.tokens
        self.recorder.add_step(number, kind, len(batch.requests), tokens, batch.preempted)
        if batch.cached_tokens:
            self.counters["prefix_cached_tokens"] += batch.cached_tokens
        self.recorder.end(SCHEDULE, number, began)

        began = self.recorder.begin(METADATA, number)
        if self.ranks is not None:
            self.ranks.send(number, batch)
        step = Step(number, batch, self.h2d.stage(batch))
        self.recorder.end(METADATA, number, began)
        self.plant.delay_host()
        if batch.program.kind != "decode":
            self.open(batch)
        return step

    def open(self, batch: Batch) -> None:
        """Announce requests that get their first token, and have stop strings, to the output."""
        program = batch.program
        if isinstance(program, Mixed):
            self.counters["prompt_chunks"] += program.prompts
        for active in batch.given[program.decode_rows :]:
            if active.request.stop and not active.tokens:
                ending = msgspec.structs.replace(finish_event(active), reason="stop")
                self.output.open(Opening(active.request.stop, ending))

    def wait_launch_done(self, step: Step) -> None:
        began = self.recorder.begin(WAIT_LAUNCH_DONE, step.number)
        waited = perf_counter_ns()
        step.launch_done.wait()
        self.counters["wait_launch_done_ns"] += perf_counter_ns() - waited
        self.recorder.end(WAIT_LAUNCH_DONE, step.number, began)

    def wait_copy_done(self, step: Step) -> list[int]:
        """Wait until a step's ids are on the host, and read them."""
        began = self.recorder.begin(WAIT_COPY_DONE, step.number)
        waited = perf_counter_ns()
        self.launch.wait_until_issued(step)  # until its copy is, there is no copy_done to wait for
        ids = self.d2h.finish(step)
        self.counters["wait_copy_done_ns"] += perf_counter_ns() - waited
        self.recorder.end(WAIT_COPY_DONE, step.number, began)
        return ids

    def process(self, step: Step, ids: list[int]) -> None:
        """Append the ids, which the next schedule needs, then see to the output, which it does not."""
        began = self.recorder.begin(APPEND, step.number)
        now = perf_counter_ns()
        appended = self.scheduler.append(step.batch, ids, self.eos)
        produced = [
            Produced(active.request.id, token, now, finish_event(active) if last else None)
            for active, token, last in appended.tokens
        ]
        if appended.drafts:
            self.counters["draft_tokens"] += appended.drafts
            self.counters["accepted_drafts"] += appended.accepted
        # A step that gave each of its requests one token, and nothing in vain, is recorded as such already.
        if appended.dropped_rows or appended.past_end or len(produced) != len(step.batch.requests):
            if appended.dropped_rows:
                self.counters["dropped_rows"] += appended.dropped_rows
            if appended.past_end:
                self.counters["tokens_past_end"] += appended.past_end
            self.recorder.set_outcome(step.number, appended.dropped_rows, len(produced))
        self.recorder.end(APPEND, step.number, began)

        if self.output.deferred:  # serial only: recorded where it runs, in catch_up
            self.hand_over(step, produced)
        else:
            began = self.recorder.begin(OUTPUT, step.number)
            self.hand_over(step, produced)
            self.recorder.end(OUTPUT, step.number, began)

    def hand_over(self, step: Step, produced: list[Produced]) -> None:
        self.output.hand_over(step.number, produced)
        self.end_stopped()

    def catch_up(self, step: Step) -> None:
        """Process output that was deferred until a step was launched. `output` is recorded in the step during
        which it runs, so that its stamps say when that was. The last step before the engine goes idle has
        two, the previous step's and its own: recorded as their sum, from the start of the first."""
        if self.output.deferred:
            began = self.recorder.begin(OUTPUT, step.number)
            self.output.catch_up()
            self.end_stopped()
            self.recorder.end(OUTPUT, step.number, began)
        else:
            self.end_stopped()

    def end_stopped(self) -> None:
        """End the requests whose text has reached a stop string, as far as that is known by now."""
        for stopped in self.output.stopped():
            if stopped.dropped:
                self.counters["stop_dropped_tokens"] += stopped.dropped
            elif self.scheduler.end(stopped.id):
                self.output.close(stopped.id)

    def settle(self) -> None:
        """Finish the step in flight: before its records are taken (whoever hears of the last end, by EOS or a
        stop string, may ask for them at once), or before another engine's turn."""
        self.end_stopped()
        if self.in_flight is not None:
            self.wait_and_process(self, self.in_flight, None)
            self.in_flight = None

    def drain(self) -> None:
        """Leave nothing begun: no step in flight, no output unsent."""
        self.settle()
        self.output.flush()
        self.end_stopped()


def finish_event(active: Active) -> Finish:
    return Finish(
        id=active.request.id,
        reason=active.finish_reason,
        prompt_tokens=len(active.prompt),
        completion_tokens=len(active.tokens),
        scores=active.scores,
        **{name: getattr(active, name, -1) for name in STAMPS},
    )
