"""The device's one core: takes commands from the streams' pipes and carries them out.

Between two programs of a steady decode (2 to 7 copies, 2 waits) this file is all the overhead there is, so
that loop allocates little, and asks the kernel for many records at a time.
"""

from __future__ import annotations

import os
import random
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from engines.devices.emulated.commands import (
    CELLS_PER_STREAM,
    COMPLETED,
    COUNTED,
    LAUNCH,
    LEAVES,
    MAX_WAITERS,
    RECORD,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    WAITERS,
    WORK_HEAD,
    WORK_ROW,
    WORK_ROWS,
    make_fence,
    waited_for,
)
from engines.tracing import Ranges, open_ranges

Command = tuple[int, ...]  # as in commands.py

READ_AHEAD = 64 * RECORD.size  # records beyond the pipe's: the launch queue is 1024 and at most these
PROGRAM, COPY_TO_DEVICE, COPY_TO_HOST = 0, 1, 2  # kinds of device work

_WAITER_BYTES = slice(WAITERS * 8, (WAITERS + MAX_WAITERS) * 8)
_WORDS = struct.Struct(f"<{MAX_WAITERS}q")
_NOBODY = bytes(MAX_WAITERS * 8)

_LARGE = 32 << 10  # a copy of this many bytes is published as soon as it is done

_LONGEST_DELAY_NS = 3_000_000


class HostGone(Exception):
    """The host closed its ends: this process has nothing left to do."""


class _Lane:
    """One stream as the executor sees it."""

    __slots__ = ("bit", "cell", "completed", "fd", "not_before", "queue")

    def __init__(self, index: int, fd: int) -> None:
        self.fd = fd
        self.bit = 1 << index
        self.cell = COMPLETED + index * CELLS_PER_STREAM
        self.completed = 0
        self.queue: deque[Command] = deque()
        self.not_before = 0  # chaos: ns before which the head may not start; 0: not drawn yet


class Executor:
    """Owns the lanes, the module's memory and programs. `serve` is the process's main loop."""

    def __init__(
        self,
        *,
        page: mmap,
        work: mmap,
        arena: mmap,
        pipes: Iterable[int],
        wakeups: Iterable[int],
        control: int,
        chaos: int | None,
    ) -> None:
        self._page = page
        self._cells = memoryview(page).cast("q")
        self._fence = make_fence()
        self._work = work
        self._rows = 0
        self._arena = memoryview(arena)
        self._wakeups = list(wakeups)
        self._notified = [0] * MAX_WAITERS
        self._control = control
        self._lanes = [_Lane(index, fd) for index, fd in enumerate(pipes)]
        self._active: list[_Lane] = []  # lanes that ever had a command: no time is spent on the others
        self._turns: list[_Lane] = []
        self._by_fd = {lane.fd: lane for lane in self._lanes}
        self._polls: dict[int, select.poll] = {}
        self._chaos = None if chaos is None else random.Random(chaos)
        self._memory: dict[int, memoryview] = {}
        self._alarm = 0  # the earliest end of a delay met since the last look into the pipes; 0: none
        self._programs: dict[int, Callable[..., None]] = {}
        self._leaves: frozenset[torch.nn.Module] = frozenset()

    # -- what is loaded ------------------------------------------------------------------------------------

    def use(
        self,
        memory: dict[int, memoryview],
        programs: dict[int, Callable[..., None]],
        leaves: frozenset[torch.nn.Module],
    ) -> None:
        """Replace the module. The host has drained every stream."""
        self._memory = memory
        self._programs = programs
        self._leaves = leaves
        for program in programs:
            self._cells[LEAVES + program] = -1

    # -- the loop ------------------------------------------------------------------------------------------

    def serve(self, answer: Callable[[], None]) -> None:
        """Until the host is gone (HostGone). `answer` is called when the control channel has a request."""
        patience: float | None = None
        while True:
            if self._take(patience):
                answer()
            self._do_copies()
            self._publish()
            lane = self._ready_to_launch()
            if lane is not None:
                self._launch(lane)
                patience = 0
            else:
                patience = self._until_ready()

    def _take(self, patience: float | None) -> bool:
        """Read commands into every empty lane; wait up to `patience` ms (None: for ever) where there are
        none. True where the control channel has something.

        A lane that still holds commands is not looked at: its pipe is the queue, and a blocked lane with a
        readable pipe would keep poll from ever sleeping.
        """
        full = 0
        for lane in self._active:
            if lane.queue:
                full |= lane.bit
        poll = self._polls.get(full)
        if poll is None:
            poll = self._polls[full] = select.poll()
            poll.register(self._control, select.POLLIN)
            for lane in self._lanes:
                if not lane.bit & full:
                    poll.register(lane.fd, select.POLLIN)
        self._alarm = 0
        asked = False
        for fd, happened in poll.poll(patience):
            if fd == self._control:
                if happened & ~select.POLLIN:
                    raise HostGone
                asked = True
                continue
            data = os.read(fd, READ_AHEAD)
            if not data:
                raise HostGone
            lane = self._by_fd[fd]
            lane.queue.extend(RECORD.iter_unpack(data))
            if lane not in self._turns:
                self._active.append(lane)
                self._turns.append(lane)
        return asked

    def _do_copies(self) -> None:
        """Everything that is ready and is not a program, in all lanes."""
        again = True
        while again:  # a copy done in one lane may be what another lane waits for
            again = False
            for lane in self._active:
                before = lane.completed
                queue = lane.queue
                while queue:
                    command = queue[0]
                    code = command[0]
                    if code >= LAUNCH:
                        break
                    if self._chaos is not None and self._held_back(lane):
                        break
                    if code == WAIT:
                        if self._lanes[command[1]].completed < command[2]:
                            break
                    else:
                        self._copy(code, command)
                    queue.popleft()
                    lane.not_before = 0
                    lane.completed += 1
                    if command[4] >= _LARGE:
                        self._publish()
                if lane.completed != before:
                    again = True

    def _copy(self, code: int, command: Command) -> None:
        _, at, buffer, offset, nbytes, _, _, _ = command
        start = perf_counter_ns()
        if code == TO_DEVICE:
            self._memory[buffer][offset : offset + nbytes] = self._arena[at : at + nbytes]
            self._worked(COPY_TO_DEVICE, -1, start)
        elif code == TO_HOST:
            self._arena[at : at + nbytes] = self._memory[buffer][offset : offset + nbytes]
            self._worked(COPY_TO_HOST, -1, start)
        else:
            raise ValueError(f"unknown command {code}")

    def _publish(self) -> None:
        """Tell the host what the lanes have completed, and wake who waited for it. Once for a program and the
        small copies after it: right after a program, with the caches full of it, this costs 10 µs.

        The first fence keeps copied bytes and work rows ahead of the counters; for the second see make_fence.
        """
        self._fence()
        for lane in self._active:
            self._cells[lane.cell] = lane.completed
        self._fence()
        if self._page[_WAITER_BYTES] == _NOBODY:
            return
        notified = self._notified
        for slot, word in enumerate(_WORDS.unpack_from(self._page, WAITERS * 8)):
            if word and word != notified[slot]:
                stream, value = waited_for(word)
                if self._lanes[stream].completed >= value:
                    notified[slot] = word  # once: the word stays until the host takes it back
                    os.eventfd_write(self._wakeups[slot], 1)

    def _worked(self, kind: int, step: int, start: int) -> None:
        row = self._rows
        WORK_ROW.pack_into(self._work, row % WORK_ROWS * WORK_ROW.size, kind, step, start, perf_counter_ns())
        self._rows = row + 1
        self._cells[WORK_HEAD] = row + 1

    # -- programs ------------------------------------------------------------------------------------------

    def _ready_to_launch(self) -> _Lane | None:
        """A lane with a program at its head; lanes take turns."""
        for lane in self._turns:
            if lane.queue and lane.queue[0][0] >= LAUNCH and not (self._chaos and self._held_back(lane)):
                return lane
        return None

    def _launch(self, lane: _Lane) -> None:
        code, program, step, leaves, *arguments = lane.queue.popleft()
        lane.not_before = 0
        self._turns.remove(lane)
        self._turns.append(lane)
        run = self._programs[program]
        given = arguments[: code >> 8]
        if leaves >= 0:
            self._walk(lane, run, given, step, leaves)
            lane.completed += 1 + leaves
            return
        start = perf_counter_ns()
        if leaves == COUNTED:
            self._cells[LEAVES + program] = self._count_leaves(run, given)
        else:
            run(*given)
        self._worked(PROGRAM, step, start)
        lane.completed += 1

    def _count_leaves(self, run: Callable[..., None], arguments: Sequence[int]) -> int:
        count = 0

        def counting(module: torch.nn.Module, _inputs: object) -> None:
            nonlocal count
            count += module in self._leaves

        with register_module_forward_pre_hook(counting):
            run(*arguments)
        return count

    def _walk(
        self, lane: _Lane, run: Callable[..., None], arguments: Sequence[int], step: int, leaves: int
    ) -> None:
        """An uncaptured program: each leaf module waits for its own command.

        The hook is torch's global one, on and off around the program: hooks kept on the leaf modules would
        take captured programs off torch's fast call path as well.
        """
        queue = lane.queue
        left = leaves
        start = perf_counter_ns()

        def consume(module: torch.nn.Module, _inputs: object) -> None:
            nonlocal left, start
            if left and module in self._leaves:
                left -= 1
                if not queue:
                    start = self._await_kernel(lane, step, start)
                queue.popleft()

        with register_module_forward_pre_hook(consume):
            run(*arguments)
        self._worked(PROGRAM, step, start)
        for _ in range(left):  # it called fewer leaf modules than when they were counted
            if not queue:
                self._receive_kernel(lane)
            queue.popleft()

    def _await_kernel(self, lane: _Lane, step: int, start: int) -> int:
        """The next leaf module's command is not issued yet: idle time. Returns when the busy time began."""
        self._take(0)
        if lane.queue:
            return start
        self._worked(PROGRAM, step, start)
        self._receive_kernel(lane)
        return perf_counter_ns()

    def _receive_kernel(self, lane: _Lane) -> None:
        while not lane.queue:
            # Before waiting: the last `_take` may have brought copies for other lanes, which would not wake
            # the next one, and the host may wait for them before it issues the rest.
            self._do_copies()
            self._publish()
            if self._take(self._until_ready()):
                raise RuntimeError("load or capture was called while a launch was being issued")

    # -- chaos ---------------------------------------------------------------------------------------------

    def _held_back(self, lane: _Lane) -> bool:
        """Whether the head of this lane may not start yet: a delay of its own, other lanes go on."""
        assert self._chaos is not None
        now = perf_counter_ns()
        if lane.not_before == 0:
            delay = self._chaos.choice((0, 0, self._chaos.randrange(_LONGEST_DELAY_NS)))
            lane.not_before = now + delay
        if lane.not_before <= now:
            return False
        self._alarm = min(self._alarm or lane.not_before, lane.not_before)
        return True

    def _until_ready(self) -> float | None:
        """Milliseconds until a delay ends; None where only the host can bring something new."""
        if not self._alarm:
            return None
        return max(0.0, (self._alarm - perf_counter_ns()) / 1e6)


RANGES = ("program", "h2d", "d2h")  # by kind of device work


class ExecutorInRanges(Executor):
    """The same under a profiler: each program and each copy is an NVTX range, with the number of its
    step (copies: -1)."""

    def __init__(self, ranges: Ranges, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._ranges = ranges

    def _copy(self, code: int, command: Command) -> None:
        self._ranges.push(COPY_TO_DEVICE if code == TO_DEVICE else COPY_TO_HOST, -1)
        super()._copy(code, command)
        self._ranges.pop()

    def _launch(self, lane: _Lane) -> None:
        self._ranges.push(PROGRAM, lane.queue[0][2])
        super()._launch(lane)
        self._ranges.pop()


def make_executor(**arguments: Any) -> Executor:
    """The executor that this process needs."""
    ranges = open_ranges("device process", RANGES)
    return Executor(**arguments) if ranges is None else ExecutorInRanges(ranges, **arguments)
