"""The host's end of the queues: submitting commands, and waiting for them."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from mmap import mmap
from typing import NamedTuple

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.devices.base import DeviceLost
from overlap_bench.engines.devices.emulated.commands import (
    CELLS_PER_STREAM,
    COMPLETED,
    KERNEL,
    MAX_WAITERS,
    RECORD,
    WAITERS,
    make_fence,
    waiting_for,
)

Lost = Callable[[], DeviceLost]  # the error to raise now that the device process is gone

_KERNEL_RECORD = RECORD.pack(KERNEL, 0, 0, 0, 0, 0, 0, 0)

# No wake-up is ever lost if `fence` is a fence. Should one be, the waiter looks again after this long, and
# counts it in `lost_wakeups`. Steps take 1 to 20 ms, so a wait seldom gets that far.
_BACKSTOP_MS = 20
_ON_ITS_WAY_MS = 200  # the device first counts, then wakes, and may lose its core in between


class EmulatedEvent(NamedTuple):
    """Happened once `stream` has completed `value` commands; with value 0 (nothing submitted), at once."""

    stream: int
    value: int


class EmulatedStream:
    """An in-order queue. Any thread may submit; the lock keeps the count in the order of the pipe."""

    __slots__ = ("_fd", "_lock", "_lost", "index", "name", "submitted")

    def __init__(self, name: str, index: int, fd: int, lost: Lost) -> None:
        self.name = name
        self.index = index
        self.submitted = 0
        self._fd = fd
        self._lock = threading.Lock()
        self._lost = lost

    def submit(self, record: bytes, kernels: int = 0) -> int:
        """Queue one command, and `kernels` leaf-module commands after it; returns the count so far.

        One system call each, about 1 µs, GIL released; blocks while the queue is full. Raises DeviceLost.
        """
        with self._lock:
            try:
                os.write(self._fd, record)
                for _ in range(kernels):
                    os.write(self._fd, _KERNEL_RECORD)
            except OSError as error:  # EPIPE: the device process is dead; EBADF: the device was closed
                raise self._lost() from error
            self.submitted += 1 + kernels
            return self.submitted

    def close(self) -> None:
        """After the device process has ended, so that no writer still holds the lock."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1  # the number may soon be another file's


class Waiting:
    """Blocks threads until events happen: each on its own eventfd, beside the device process's pidfd."""

    def __init__(self, page: mmap, pidfd: int, wakeups: list[int], lost: Lost) -> None:
        self._cells = memoryview(page).cast("q")
        self._pidfd = pidfd
        self._wakeups = wakeups
        self._lost = lost
        self._free = list(range(MAX_WAITERS))[::-1]
        self._own = threading.local()
        self._closed = False
        self.lost_wakeups = 0

    def happened(self, event: EmulatedEvent) -> bool:
        """0.2 µs."""
        return self._cells[COMPLETED + event.stream * CELLS_PER_STREAM] >= event.value

    def until(self, event: EmulatedEvent) -> None:
        """Block, GIL released, until `event`. Raises DeviceLost."""
        if self.happened(event):
            return
        if self._closed:
            raise self._lost()
        seat = self._seat()
        cells = self._cells
        cells[seat.cell] = waiting_for(event.stream, event.value)
        seat.fence()
        try:
            while not self.happened(event):
                ready = seat.poll.poll(_BACKSTOP_MS)
                if not ready and self.happened(event):
                    ready = seat.poll.poll(_ON_ITS_WAY_MS)
                    self.lost_wakeups += not ready
                for fd, _ in ready:
                    if fd == self._pidfd:
                        if self.happened(event):
                            break
                        raise self._lost()
                    os.eventfd_read(fd)
        finally:
            cells[seat.cell] = 0
        seat.fence()  # what the caller reads next was written before the counter was

    def close(self) -> None:
        self._closed = True
        for fd in (*self._wakeups, self._pidfd):
            os.close(fd)

    def _seat(self) -> _Seat:
        """This thread's place in the waiter table; given back when the thread ends."""
        try:
            seat: _Seat = self._own.seat
        except AttributeError:
            if not self._free:
                raise EngineError(f"more than {MAX_WAITERS} threads wait for the emulated device") from None
            seat = self._own.seat = _Seat(self._free, self._wakeups, self._pidfd)
        return seat


class _Seat:
    __slots__ = ("_free", "_slot", "cell", "fence", "poll")

    def __init__(self, free: list[int], wakeups: list[int], pidfd: int) -> None:
        self._free = free
        self._slot = free.pop()
        self.cell = WAITERS + self._slot
        self.fence = make_fence()
        self.poll = select.poll()
        self.poll.register(wakeups[self._slot], select.POLLIN)
        self.poll.register(pidfd, select.POLLIN)

    def __del__(self) -> None:
        self._free.append(self._slot)
