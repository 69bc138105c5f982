"""Step records: when each phase of each step began and ended on the host.

Rows are preallocated, so that recording never allocates on a step beyond the stamps' own integers; a phase
costs two stamps and one call, about 0.3 us. With a profiler attached, the same calls are NVTX ranges.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns

import nvtx

from engines.api import PHASES, STEP_KINDS, StepTable

(RECV, SCHEDULE, METADATA, H2D, LAUNCH, WAIT_LAUNCH_DONE, WAIT_COPY_DONE, APPEND, OUTPUT) = range(len(PHASES))

FACTS = ("step", "kind", "batch", "tokens", "dropped", "preempted")
COLUMNS = FACTS + tuple(f"{phase}.{end}" for phase in PHASES for end in ("start", "end"))
WIDTH = len(COLUMNS)
MOST_STEPS = 1 << 17  # of one round; later steps are run, not recorded, and counted as `lost`


class Recorder:
    """Records of one round. Two threads may record, each its own phases of a step."""

    def __init__(self) -> None:
        self._cells = array("q", [-1]) * (MOST_STEPS * WIDTH)
        self._first = 0  # the number of the first step of this round
        self._rows = 0
        self.lost = 0
        domain = nvtx.get_domain("engine")
        self._push = domain.push_range
        self._pop = domain.pop_range
        self._ranges = [domain.get_event_attributes(message=phase, category="step") for phase in PHASES]

    def begin_round(self, next_step: int) -> None:
        self._cells[: self._rows * WIDTH] = array("q", [-1]) * (self._rows * WIDTH)
        self._first = next_step
        self._rows = 0
        self.lost = 0

    def add_step(self, step: int, kind: str, batch: int, tokens: int, preempted: int) -> None:
        """A step was scheduled; steps are added in order."""
        row = step - self._first
        if row >= MOST_STEPS:
            self.lost += 1
            return
        self._rows = row + 1
        at, cells = row * WIDTH, self._cells
        cells[at], cells[at + 1], cells[at + 2] = step, STEP_KINDS.index(kind), batch
        cells[at + 3], cells[at + 4], cells[at + 5] = tokens, 0, preempted

    def set_dropped(self, step: int, rows: int) -> None:
        if 0 <= step - self._first < MOST_STEPS:
            self._cells[(step - self._first) * WIDTH + FACTS.index("dropped")] = rows

    def begin(self, phase: int) -> int:
        """A phase begins on this thread; hand what comes back to `end`."""
        self._push(self._ranges[phase])
        return perf_counter_ns()

    def end(self, phase: int, step: int, began: int) -> None:
        """The phase ends, and belongs to that step. A phase that comes twice in a step is summed up: its
        end moves on by what it took."""
        now = perf_counter_ns()
        self._pop()
        row = step - self._first
        if not 0 <= row < MOST_STEPS:
            return
        at = row * WIDTH + len(FACTS) + 2 * phase
        cells = self._cells
        if cells[at] < 0:
            cells[at] = began
            cells[at + 1] = now
        else:
            cells[at + 1] += now - began

    def table(self) -> StepTable | None:
        return StepTable(list(COLUMNS), self._rows, self._cells[: self._rows * WIDTH].tobytes())


class NoRecorder(Recorder):
    """Records nothing: what the recorder itself costs is the difference to this."""

    def __init__(self) -> None:
        self.lost = 0

    def begin_round(self, next_step: int) -> None:
        pass

    def add_step(self, step: int, kind: str, batch: int, tokens: int, preempted: int) -> None:
        pass

    def set_dropped(self, step: int, rows: int) -> None:
        pass

    def begin(self, phase: int) -> int:
        return 0

    def end(self, phase: int, step: int, began: int) -> None:
        pass

    def table(self) -> None:
        return None
