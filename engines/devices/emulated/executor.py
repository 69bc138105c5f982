"""The device's one core: takes commands from the streams' pipes and carries them out.

Between two programs of a steady decode (2 to 7 copies, 2 waits) this file is all the overhead there is, so
that loop allocates little, and asks the kernel for many records at a time.

A program with a pace has computed before its time is up. Until then its lane stands still and no other
program starts, but the loop goes on with the copies of other lanes, and sleeps while there are none. It wakes
a little early and looks at the clock for the rest: the kernel's own wake-up would come 0.05 to 0.1 ms late.
A program begins where the clock says: at the end of the one before it, if all that it needs was there by
then. So this process's own lateness does not add up from program to program.
"""

from __future__ import annotations

import os
import random
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from time import perf_counter_ns
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from overlap_bench.engines.clock import Clock
from overlap_bench.engines.devices.emulated.commands import (
    CELLS_PER_STREAM,
    COMPLETED,
    COUNTED,
    LATE_NS,
    LAUNCH,
    LEAVES,
    MAX_WAITERS,
    OVERRAN,
    PACED,
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
from overlap_bench.engines.devices.emulated.timer import Timer
from overlap_bench.engines.tracing import Ranges, open_ranges

Command = tuple[int, ...]  # as in commands.py
PaceNs = Callable[[int, tuple[int, ...]], int]  # by program and arguments; 0: none

READ_AHEAD = 64 * RECORD.size  # records beyond the pipe's: the launch queue is 1024 and at most these
PROGRAM, COPY_TO_DEVICE, COPY_TO_HOST = 0, 1, 2  # kinds of device work

_WAITER_BYTES = slice(WAITERS * 8, (WAITERS + MAX_WAITERS) * 8)
_WORDS = struct.Struct(f"<{MAX_WAITERS}q")
_NOBODY = bytes(MAX_WAITERS * 8)

_LARGE = 32 << 10  # a copy of this many bytes is published as soon as it is done

_LONGEST_DELAY_NS = 3_000_000

_WAKE_EARLY_NS = 300_000  # before a pace's end, at most
_AWAKE = 0.03  # the share of a pace that may go by awake


def unpaced(program: int, arguments: tuple[int, ...]) -> int:
    return 0


class HostGone(Exception):
    """The host closed its ends: this process has nothing left to do."""


class _Lane:
    """One stream as the executor sees it."""

    __slots__ = ("bit", "cell", "completed", "fd", "not_before", "queue", "ready", "running")

    def __init__(self, index: int, fd: int) -> None:
        self.fd = fd
        self.bit = 1 << index
        self.cell = COMPLETED + index * CELLS_PER_STREAM
        self.completed = 0
        self.queue: deque[Command] = deque()
        self.not_before = 0  # chaos: ns before which the head may not start; 0: not drawn yet
        self.ready = 0  # ns: since when all is there that its program needs
        self.running = False  # its program has computed, and its time is not up


@dataclass(slots=True)
class _Running:
    """The program on the device: launched, and not completed yet."""

    lane: _Lane
    commands: int
    step: int
    start: int
    pace: int  # ns; 0: it takes as long as it computes
    due: int = 0  # its end, where it has a pace


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
        paced: bool,
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
        self._pace_ns: PaceNs = unpaced
        self._timer = Timer() if paced else None
        self._clock = Clock()
        self._running: _Running | None = None  # what waits for its pace

    # -- what is loaded ------------------------------------------------------------------------------------

    def use(
        self,
        memory: dict[int, memoryview],
        programs: dict[int, Callable[..., None]],
        leaves: frozenset[torch.nn.Module],
        pace_ns: PaceNs,
    ) -> None:
        """Replace the module. The host has drained every stream."""
        self._memory = memory
        self._programs = programs
        self._leaves = leaves
        self._pace_ns = cache(pace_ns)
        for program in programs:
            self._cells[LEAVES + program] = -1

    # -- the loop ------------------------------------------------------------------------------------------

    def serve(self, answer: Callable[[], None]) -> None:
        """Until the host is gone (HostGone). `answer` is called when the control channel has a request."""
        patience: float | None = None
        while True:
            if self._take(patience):
                answer()
            if self._running is not None:
                self._end_if_due(self._running)
            self._do_copies()
            self._publish()
            lane = self._ready_to_launch() if self._running is None else None
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
            if self._timer is not None:
                poll.register(self._timer.fd, select.POLLIN)
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
            if self._timer is not None and fd == self._timer.fd:
                self._timer.clear()  # else no later poll would sleep
                continue
            data = os.read(fd, READ_AHEAD)
            if not data:
                raise HostGone
            lane = self._by_fd[fd]
            lane.queue.extend(RECORD.iter_unpack(data))
            lane.ready = perf_counter_ns()
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
                while queue and not lane.running:
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
                    lane.ready = perf_counter_ns()
                    again = True

    def _copy(self, code: int, command: Command) -> None:
        _, at, buffer, offset, nbytes, _, _, _ = command
        start = perf_counter_ns()
        if code == TO_DEVICE:
            self._memory[buffer][offset : offset + nbytes] = self._arena[at : at + nbytes]
            self._worked(COPY_TO_DEVICE, -1, start, perf_counter_ns())
        elif code == TO_HOST:
            self._arena[at : at + nbytes] = self._memory[buffer][offset : offset + nbytes]
            self._worked(COPY_TO_HOST, -1, start, perf_counter_ns())
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

    def _worked(self, kind: int, step: int, start: int, end: int) -> None:
        row = self._rows
        WORK_ROW.pack_into(self._work, row % WORK_ROWS * WORK_ROW.size, kind, step, start, end)
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
        given = [*arguments, code >> 16][: code >> 8 & 0xFF]
        pace = self._pace_ns(program, tuple(given))
        launched = _Running(lane, 1 + max(leaves, 0), step, perf_counter_ns(), pace)
        if pace:
            ready = lane.ready if self._chaos is None else launched.start
            launched.due = self._clock.launch(pace, ready)
            launched.start = launched.due - pace
        if leaves >= 0:
            self._walk(launched, run, given, leaves)
        elif leaves == COUNTED:
            self._cells[LEAVES + program] = self._count_leaves(run, given)
        else:
            run(*given)
        self._computed(launched)

    def _computed(self, program: _Running) -> None:
        """Complete a program that has no pace or is late for it; any other waits for its time."""
        now = perf_counter_ns()
        if program.pace:
            self._cells[PACED] += 1
            if now < program.due:
                assert self._timer is not None
                program.lane.running = True
                self._running = program
                self._timer.set(program.due - _awake(program))
                return
            self._cells[OVERRAN] += 1
        self._complete(program, now)

    def _end_if_due(self, program: _Running) -> None:
        now = perf_counter_ns()
        if now >= program.due:
            self._cells[LATE_NS] += now - program.due
            program.lane.running = False
            self._running = None
            self._complete(program, program.due)

    def _complete(self, program: _Running, end: int) -> None:
        self._clock.free = end
        self._worked(PROGRAM, program.step, program.start, end)
        program.lane.completed += program.commands

    def _count_leaves(self, run: Callable[..., None], arguments: Sequence[int]) -> int:
        count = 0

        def counting(module: torch.nn.Module, _inputs: object) -> None:
            nonlocal count
            count += module in self._leaves

        with register_module_forward_pre_hook(counting):
            run(*arguments)
        return count

    def _walk(
        self, program: _Running, run: Callable[..., None], arguments: Sequence[int], leaves: int
    ) -> None:
        """An uncaptured program: each leaf module waits for its own command, and has its share of the pace.

        The shares are added up, and waited for at the end: no one sees a kernel end but the device. Idle is
        what is left between the end of one leaf module's share and the coming of the next one's command.

        The hook is torch's global one, on and off around the program: hooks kept on the leaf modules would
        take captured programs off torch's fast call path as well.
        """
        lane, queue = program.lane, program.lane.queue
        left = leaves
        share = program.pace // leaves if leaves else 0
        program.due -= share * leaves

        def consume(module: torch.nn.Module, _inputs: object) -> None:
            nonlocal left
            if left and module in self._leaves:
                left -= 1
                if not queue:
                    self._await_kernel(program)
                queue.popleft()
                program.due += share

        with register_module_forward_pre_hook(consume):
            run(*arguments)
        program.due += share * left
        for _ in range(left):  # it called fewer leaf modules than when they were counted
            if not queue:
                self._receive_kernel(lane)
            queue.popleft()

    def _await_kernel(self, program: _Running) -> None:
        """The next leaf module's command is not issued yet: idle time, once the last one's share is over."""
        self._take(0)
        if program.lane.queue:
            return
        idle_from = max(perf_counter_ns(), program.due if program.pace else 0)
        self._receive_kernel(program.lane)
        now = perf_counter_ns()
        if now > idle_from:
            self._worked(PROGRAM, program.step, program.start, idle_from)
            program.start = program.due = now

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
        """Milliseconds until a delay ends, none towards the end of a pace; None where only the host, or the
        timer, can bring something new."""
        if self._running is not None and perf_counter_ns() >= self._running.due - _awake(self._running):
            return 0
        if not self._alarm:
            return None
        return max(0.0, (self._alarm - perf_counter_ns()) / 1e6)


def _awake(program: _Running) -> int:
    """Nanoseconds before its end from which a program is not slept through."""
    return min(_WAKE_EARLY_NS, int(program.pace * _AWAKE))


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

    def _complete(self, program: _Running, end: int) -> None:
        super()._complete(program, end)
        self._ranges.pop()


def make_executor(**arguments: Any) -> Executor:
    """The executor that this process needs."""
    ranges = open_ranges("device process", RANGES)
    return Executor(**arguments) if ranges is None else ExecutorInRanges(ranges, **arguments)
