"""Where the phases of a step are reported, by one pair of calls: `begin` and `end`.

Always to the step records: when each phase of each step began and ended. Rows are preallocated, so that
recording never allocates on a step beyond the stamps' own integers; a phase costs two stamps and two calls,
about 0.4 us. With a Tracer, also to NVTX, and to the timeline of a profiled round.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns

from overlap_bench.engines.api import PHASES, STEP_COLUMNS, STEP_KINDS, HostRanges, StepTable
from overlap_bench.engines.delay import Delay
from overlap_bench.engines.tracing import RangeLog, Window, listening

(RECV, SCHEDULE, METADATA, H2D, LAUNCH, WAIT_LAUNCH_DONE, WAIT_COPY_DONE, APPEND, OUTPUT) = range(len(PHASES))

WIDTH = len(STEP_COLUMNS)
STARTS = tuple(STEP_COLUMNS.index(f"{phase}.start") for phase in PHASES)  # its end is the next column


class Recorder:
    """Records of one round. Two threads may record, each its own phases of a step."""

    most_steps = 1 << 17  # of one round; later steps are run, not recorded, and counted as `lost`

    def __init__(self) -> None:
        self._cells = array("q", [-1]) * (self.most_steps * WIDTH)
        self._first = 0  # the number of the first step of this round
        self._rows = 0
        self.lost = 0
        self.delay = Delay()

    def begin_round(self, next_step: int) -> None:
        # One row more than there are steps: a `recv` goes to the step that may follow, and none followed the
        # last. What it left there would count into that row's step of the new round.
        used = min(self._rows + 1, self.most_steps) * WIDTH
        self._cells[:used] = array("q", [-1]) * used
        self._first = next_step
        self._rows = 0
        self.lost = 0

    def add_step(self, step: int, kind: str, batch: int, tokens: int, preempted: int) -> None:
        """A step was scheduled; steps are added in order."""
        row = step - self._first
        if row >= self.most_steps:
            self.lost += 1
            return
        self._rows = row + 1
        at, cells = row * WIDTH, self._cells
        cells[at], cells[at + 1], cells[at + 2] = step, STEP_KINDS.index(kind), batch
        cells[at + 3], cells[at + 4], cells[at + 5], cells[at + 6] = tokens, 0, preempted, batch

    def set_outcome(self, step: int, dropped: int, given: int) -> None:
        """For a step that did not give each of its requests one token."""
        if 0 <= step - self._first < self.most_steps:
            at = (step - self._first) * WIDTH
            self._cells[at + 4], self._cells[at + 6] = dropped, given

    def begin(self, phase: int, step: int) -> int:
        """A phase begins on this thread; pass the result to `end`. `step`: the one that it belongs to, or may
        turn out to belong to."""
        return perf_counter_ns()

    def end(self, phase: int, step: int, began: int) -> None:
        """The phase ends, and belongs to that step; none if it is negative. A phase that comes twice in a
        step is summed: its end moves on by what the second one took."""
        if self.delay.phase and step >= 0:
            self.delay.spend(PHASES[phase])
        now = perf_counter_ns()
        row = step - self._first
        if not 0 <= row < self.most_steps:
            return
        at = row * WIDTH + STARTS[phase]
        cells = self._cells
        if cells[at] < 0:
            cells[at] = began
            cells[at + 1] = now
        else:
            cells[at + 1] += now - began

    def forget(self, phase: int, step: int) -> None:
        """Drop what was recorded of that phase for a step that has not come: it belongs to none."""
        row = step - self._first
        if 0 <= row < self.most_steps:
            at = row * WIDTH + STARTS[phase]
            self._cells[at] = self._cells[at + 1] = -1

    def table(self) -> StepTable | None:
        return StepTable(list(STEP_COLUMNS), self._rows, self._cells[: self._rows * WIDTH].tobytes())


class Tracer(Recorder):
    """A recorder that also reports each phase to NVTX, and in a profiled round keeps each one by itself, for
    a timeline, and marks a window of steady decode."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges = RangeLog("engine", PHASES)
        self.window = Window()

    def begin_profile(self, next_step: int, steps: int) -> None:
        """Begin a round that is kept, with a window of so many steps in it."""
        self.begin_round(next_step)
        self._ranges.keep()
        self.window.begin(steps)

    def end_profile(self) -> HostRanges:
        self.window.end()
        return self._ranges.take("engine", "scheduler")

    def add_step(self, step: int, kind: str, batch: int, tokens: int, preempted: int) -> None:
        super().add_step(step, kind, batch, tokens, preempted)
        self.window.add_step(step, kind)

    def begin(self, phase: int, step: int) -> int:
        return self._ranges.begin(phase, step)

    def end(self, phase: int, step: int, began: int) -> None:
        super().end(phase, step, began)
        self._ranges.end(phase, step, began)


class NoRecorder(Recorder):
    """Records nothing: what the recorder itself costs is the difference to this."""

    most_steps = 0

    def add_step(self, step: int, kind: str, batch: int, tokens: int, preempted: int) -> None:
        pass

    def begin(self, phase: int, step: int) -> int:
        return 0

    def end(self, phase: int, step: int, began: int) -> None:
        pass

    def table(self) -> None:
        return None


def make_recorder(records: bool) -> Recorder:
    """What a boot needs: `records` on or off, and with them NVTX where a tool listens."""
    if not records:
        return NoRecorder()
    return Tracer() if listening() else Recorder()
