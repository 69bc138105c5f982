"""The time line of a device that is told how long to take, and waits that end when they should.

A thread that waits for a device, or is inside of a driver's call, does not hold Python's global lock (the
GIL). So each wait here is one foreign call without the lock: the kernel's sleep to shortly before the end, as
it wakes a thread 15 to 50 us late, and the rest awake in a loop of a few instructions that reads the
processor's time stamp. Nothing in the standard library passes 5 us without the lock: time.sleep(5e-6) takes
20 us, and a loop of time.sleep(0) or of sched_yield takes the lock back at each turn, beside a busy thread
for 5 ms each. Hence the instructions, for x86-64; elsewhere it is sleep and sched_yield.

Achieved on two cores of an AMD EPYC VM, where nothing else may take the core (`chrt -f 10`), us (mean;
p99): `spend` of 2: 2.2; 3.4, of 10: 10.3; 11.0, of 100: 100.5; 102.1. A wait of 10 ms ends 0.03; 0.03 late.
Python goes on 58; 92 later, as others' data are in the caches by then. Beside others that keep both cores
busy, and without `chrt`, p50 are the same, and a wait of 10 ms ends 70 to 130 us late on average, 2.6 to
4.4 ms at p99: slices of theirs. Beside a thread that is busy in Python, a call comes back after the
interpreter's switch interval, 5 ms, as a driver's would. `python -m overlap_bench.engines.clock` measures
it anew.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import perf_counter_ns

from overlap_bench.engines.timers import ask_for_exact_timers, ask_for_short_slice

AWAKE_NS = 60_000  # before the end of a wait, in which the kernel may wake its thread late
KEPT = 1 << 16  # waits whose lateness is kept

# long pass(const timespec *until, long ticks): sleep to `until` where there is one, then spin until so many
# ticks of the time stamp counter have gone by since the call; back at once where a signal ended the sleep.
# Gives the ticks that did go by. 230 is clock_nanosleep; a system call changes rax, rcx and r11 alone.
_PASS = bytes.fromhex(
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
_STAMP = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


@dataclass(frozen=True)
class _Native:
    """`_PASS` in memory, what a tick is worth, and what a call takes beside the ticks it was given."""

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
    """The same without `_PASS`: the lock is taken back between two looks at the time."""

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
    """How time is passed here. The first call takes 20 ms, to learn what a tick is worth."""
    try:
        steady = "constant_tsc" in Path("/proc/cpuinfo").read_text("utf-8", "replace")
        if platform.machine() != "x86_64" or not steady:
            raise OSError("no time stamp counter that it knows")
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # or a kernel that lets nobody write what is to be executed
        return _Portable(ctypes.CDLL(None).sched_yield)
    page.write(_PASS + _STAMP)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_long)(address)
    call.page = page  # type: ignore[attr-defined]  # lives as long as what runs in it
    stamp = ctypes.CFUNCTYPE(ctypes.c_long)(address + len(_PASS))

    def both() -> tuple[int, int, int]:
        """How long it took to read a moment as nanoseconds and as ticks, and these: the quickest of some."""
        readings = [(perf_counter_ns(), stamp(), perf_counter_ns()) for _ in range(50)]
        return min((after - before, (before + after) // 2, ticks) for before, ticks, after in readings)

    _, first_ns, first = both()
    time.sleep(0.02)
    _, last_ns, last = both()
    made = _Native(call, (last - first) / (last_ns - first_ns), 0)
    return replace(made, overhead_ns=min(_took(made.spin, 0) for _ in range(200)))


def _took(call: Callable[[int], None], ns: int) -> int:
    begin = perf_counter_ns()
    call(ns)
    return perf_counter_ns() - begin


def spend(ns: int) -> None:
    """Pass `ns` on this thread, awake and without the lock, as inside of a driver's call."""
    if ns > 0:
        _passing().spin(ns)


@dataclass(frozen=True)
class Lateness:
    """How much later than they should the last waits ended. The time that a thread then waits for the lock is
    the host's, and not in it."""

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
        self._lock = threading.Lock()
        self._thread = threading.local()  # the kernel is asked by each thread for itself
        self._late: deque[int] = deque(maxlen=KEPT)
        self._passing = _passing()

    def launch(self, ns: int, at: int | None = None) -> int:
        """Queue work of this length, launched at `at` (now), behind what is queued; its end."""
        with self._lock:
            self.free = max(perf_counter_ns() if at is None else at, self.free) + ns
            return self.free

    def wait(self, end_ns: int) -> None:
        """Sleep until then, without the lock. What follows the sleep runs with cold caches, and is short."""
        now = perf_counter_ns()
        if now >= end_ns:
            return
        if not hasattr(self._thread, "asked"):
            ask_for_exact_timers()
            ask_for_short_slice()
            self._thread.asked = True
        while now < end_ns:  # again, where a signal ended it
            ended = self._passing.sleep(now, end_ns)
            now = perf_counter_ns()
        self._late.append(ended - end_ns)

    @property
    def lateness(self) -> Lateness:
        late = sorted(self._late)
        p99 = late[min(len(late) - 1, len(late) * 99 // 100)] if late else 0
        return Lateness(len(late), sum(late) / max(1, len(late)), p99)


def _measure() -> None:
    """Print how exact waits and `spend` are here, alone and beside a thread that is busy in Python."""
    busy = threading.Event()

    def work() -> None:
        while busy.is_set():
            sum(range(50))

    def row(name: str, taken: list[int]) -> None:
        taken.sort()
        mean, p50, p99 = sum(taken) / len(taken), taken[len(taken) // 2], taken[len(taken) * 99 // 100]
        print(
            f"  {name:24} mean {mean / 1e3:8.2f}  p50 {p50 / 1e3:8.2f}  p99 {p99 / 1e3:8.2f} us", flush=True
        )

    def rows(tries: int) -> None:
        for us in (2, 5, 10, 20, 50, 100):
            row(f"spend {us} us", [_took(spend, us * 1000) for _ in range(tries)])
        for ms in (1, 10):
            clock, seen = Clock(), []
            for _ in range(300):
                end = clock.launch(ms * 1_000_000)
                clock.wait(end)
                seen.append(perf_counter_ns() - end)
            found = clock.lateness
            print(f"  late for {ms:2} ms             mean {found.mean_ns / 1e3:8.2f}{' ' * 15}", end="")
            print(f"  p99 {found.p99_ns / 1e3:8.2f} us")
            row("  and Python goes on", seen)

    print("alone:" if isinstance(_passing(), _Native) else "alone, without the instructions:")
    rows(2000)
    print("beside a busy thread:")
    busy.set()
    threading.Thread(target=work).start()
    rows(100)
    busy.clear()


if __name__ == "__main__":
    _measure()
