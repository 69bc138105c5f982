"""The time line of a device that is told how long to take, and waits that end when they should.

A thread that waits for a device, or is inside of a driver's call, does not hold Python's global lock (the
GIL). So each wait here is one foreign call without the lock: the kernel's sleep to shortly before the end, as
it wakes a thread 15 to 50 us late, and the rest awake in a loop of a few instructions that reads the
processor's time stamp. Nothing in the standard library passes 5 us without the lock: time.sleep(5e-6) takes
20 us, and a loop of time.sleep(0) or of sched_yield takes the lock back at each turn, beside a busy thread
for 5 ms each. Hence the instructions, for x86-64; elsewhere it is sleep and sched_yield.

Achieved on two cores of an AMD EPYC VM (`python -m overlap_bench.engines.clock` measures it anew):

MEASURED
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter_ns

from overlap_bench.engines.timers import ask_for_exact_timers, ask_for_short_slice

AWAKE_NS = 60_000  # before the end of a wait, in which the kernel may wake its thread late
KEPT = 1 << 16  # waits whose lateness is kept

# long pass(const timespec *until, long ticks): sleep to `until` where there is one, then spin until so many
# ticks of the time stamp counter have gone by since the call; back at once where a signal ended the sleep.
# Gives the ticks that did go by. 230 is clock_nanosleep; a system call changes rax, rcx and r11 alone.
_CODE = bytes.fromhex(
    "0f31 48c1e220 4809d0"  #         rdtsc; shl rdx, 32; or rax, rdx
    "4989c0 4c8d0c30"  #              mov r8, rax; lea r9, [rax + rsi]
    "4885ff 741e"  #                  test rdi, rdi; jz spin
    "4889fa bf01000000 be01000000"  # mov rdx, rdi; mov edi, CLOCK_MONOTONIC; mov esi, TIMER_ABSTIME
    "4531d2 b8e6000000 0f05"  #       xor r10d, r10d; mov eax, 230; syscall
    "85c0 7403 4531c9"  #             test eax, eax; jz spin; xor r9d, r9d
    "0f31 48c1e220 4809d0"  #   spin: rdtsc; shl rdx, 32; or rax, rdx
    "4c39c8 7304 f390 ebee"  #        cmp rax, r9; jae done; pause; jmp spin
    "4c29c0 c3"  #              done: sub rax, r8; ret
)


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


@dataclass(frozen=True)
class _Native:
    """`_CODE` in memory, what a tick is worth, and what a call takes beside the ticks it was given."""

    call: Callable[[object, int], int]
    ticks_a_ns: float
    overhead_ns: int

    def sleep(self, now: int, end: int) -> int:
        """Pass the time from `now` to `end`; when it did end, before this thread had the lock again."""
        until = _Timespec(*divmod(end - AWAKE_NS, 1_000_000_000)) if end - now > 2 * AWAKE_NS else None
        pointer = until and ctypes.byref(until)
        return now + int(self.call(pointer, int((end - now) * self.ticks_a_ns)) / self.ticks_a_ns)

    def spin(self, ns: int) -> None:
        self.call(None, int((ns - self.overhead_ns) * self.ticks_a_ns))


@dataclass(frozen=True)
class _Portable:
    """The same without `_CODE`: the lock is taken back between two looks at the time."""

    yield_core: Callable[[], int]

    def sleep(self, now: int, end: int) -> int:
        if end - now > 2 * AWAKE_NS:
            time.sleep((end - now - AWAKE_NS) / 1e9)
        return self._spin(end)

    def spin(self, ns: int) -> None:
        self._spin(perf_counter_ns() + ns)

    def _spin(self, end: int) -> int:
        while (now := perf_counter_ns()) < end:
            self.yield_core()
        return now


@cache
def _passing() -> _Native | _Portable:
    """How time is passed here. The first call takes 10 ms: it measures what a tick is worth."""
    try:
        steady = "constant_tsc" in Path("/proc/cpuinfo").read_text("utf-8")
        if platform.machine() != "x86_64" or not steady:
            raise OSError("no time stamp counter that it knows")
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # or a kernel that lets nobody write what is to be executed
        return _Portable(ctypes.CDLL(None).sched_yield)
    page.write(_CODE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_long)(address)
    call.page = page  # type: ignore[attr-defined]  # lives as long as what runs in it

    def shortest(ticks: int, tries: int) -> int:
        taken = []
        for _ in range(tries):
            begin = perf_counter_ns()
            call(None, ticks)
            taken.append(perf_counter_ns() - begin)
        return min(taken)

    overhead, ticks = shortest(0, 200), 5_000_000
    return _Native(call, ticks / (shortest(ticks, 5) - overhead), overhead)


def spend(ns: int) -> None:
    """Pass `ns` on this thread, awake and without the lock, as inside of a driver's call."""
    if ns > 0:
        _passing().spin(ns)


@dataclass(frozen=True)
class Lateness:
    """How much later than they should waits ended, without the time that a thread waits for the lock."""

    waits: int
    mean_ns: float
    p99_ns: int


class Clock:
    """A device that does nothing but take its time: work is queued, and one piece begins when the one before
    it ends. All ends are of time.perf_counter_ns, and follow from the launches alone: that a wait ended late
    moves none of them.
    """

    spend = staticmethod(spend)

    def __init__(self) -> None:
        self.free = 0  # the end of all that was launched
        self.busy_ns = 0  # the sum of all that was launched
        self._lock = threading.Lock()
        self._thread = threading.local()  # the kernel is asked by each thread for itself
        self._waits = self._late = 0
        self._last: deque[int] = deque(maxlen=KEPT)
        _passing()

    def launch(self, ns: int, at: int | None = None) -> int:
        """Queue work of this length, launched at `at` (now), behind what is queued; its end."""
        with self._lock:
            self.free = max(perf_counter_ns() if at is None else at, self.free) + ns
            self.busy_ns += ns
            return self.free

    def wait(self, end_ns: int) -> None:
        """Sleep until then, without the lock."""
        now = perf_counter_ns()
        if now >= end_ns:
            return
        if not hasattr(self._thread, "asked"):
            ask_for_exact_timers()
            ask_for_short_slice()
            self._thread.asked = True
        while now < end_ns:
            ended = _passing().sleep(now, end_ns)
            now = perf_counter_ns()
        self.saw(end_ns, ended)

    def saw(self, end_ns: int, ended_ns: int) -> None:
        """Count a wait for `end_ns` that ended at `ended_ns`, for those who wait by other means."""
        late = max(0, ended_ns - end_ns)
        self._waits += 1
        self._late += late
        self._last.append(late)

    @property
    def lateness(self) -> Lateness:
        """Of all waits the mean, of the last of them the 99th percentile."""
        last = sorted(self._last)
        p99 = last[min(len(last) - 1, len(last) * 99 // 100)] if last else 0
        return Lateness(self._waits, self._late / max(1, self._waits), p99)


def _measure() -> None:
    """Print how exact waits and `spend` are here, alone and beside a busy Python thread."""
    clock, stopped = Clock(), False

    def work() -> None:
        while not stopped:
            sum(range(50))

    def row(name: str, values: list[float]) -> None:
        values.sort()
        mean, p99 = sum(values) / len(values), values[len(values) * 99 // 100]
        print(f"  {name:12} mean {mean:9.2f}  p50 {values[len(values) // 2]:9.2f}  p99 {p99:9.2f} us")

    for place, tries in (("alone", 2000), ("beside a busy thread", 100)):
        print(f"{place} ({type(_passing()).__name__.strip('_').lower()}):")
        if tries == 100:
            threading.Thread(target=work, daemon=True).start()
        for us in (2, 5, 10, 20, 50, 100):
            taken = []
            for _ in range(tries):
                begin = perf_counter_ns()
                spend(us * 1000)
                taken.append((perf_counter_ns() - begin) / 1e3)
            row(f"spend {us} us", taken)
        for ms in (1, 10):
            clock, begin, late = Clock(), perf_counter_ns(), []
            for _ in range(300):
                end = clock.launch(ms * 1_000_000)
                clock.wait(end)
                late.append((perf_counter_ns() - end) / 1e3)
            row(f"wait {ms} ms", late)
            found = clock.lateness
            own = f"mean {found.mean_ns / 1e3:9.2f}  p99 {found.p99_ns / 1e3:9.2f} us"
            print(f"  the clock's own {own}; {(perf_counter_ns() - begin) / 300 / 1e6:.4f} ms a step")
    stopped = True


if __name__ == "__main__":
    _measure()
