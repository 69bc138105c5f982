"""What else the machine does while an engine has its turn: CPU time of processes that are not of the run,
which no change of an engine can move. Read between turns."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress

NEEDED = 4  # cores, at most, that a run's processes want at once: host, device, output, load generator
MOST = 2000  # processes: beyond, a reading would take longer than a step


class Others:
    """CPU time of every process but those of `run`. One that this process may not see is not counted, nor
    what one does between the last reading and its end. A reading costs 2 us a process."""

    def __init__(self, run: Collection[int]) -> None:
        self._run = frozenset(run)
        self._used: dict[int, int] = {}  # ns, by pid, as last read
        self._all_ns = 0
        self._used = self._read()

    def cpu_ns(self) -> int:
        """Since this was made; -1 where this machine does not tell."""
        if not self._used:
            return -1
        now = self._read()
        self._all_ns += sum(max(0, ns - self._used.get(pid, 0)) for pid, ns in now.items())
        self._used = now
        return self._all_ns

    def held_ns(self, before_ns: int, now_ns: int, elapsed_ns: int) -> int:
        """What they took of the run's cores between two readings; -1 where it is not told. On a machine with
        many cores there is room for both: what fits beside a run is not counted."""
        if now_ns < 0:
            return -1
        room = max(0, (os.cpu_count() or 1) - NEEDED)
        return max(0, now_ns - before_ns - room * elapsed_ns)

    def _read(self) -> dict[int, int]:
        found: dict[int, int] = {}
        with suppress(OSError):
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
            for pid in pids if len(pids) <= MOST else ():
                if pid not in self._run:
                    with suppress(OSError):  # it has ended
                        found[pid] = time.clock_gettime_ns(~pid << 3 | 2)  # clock_getcpuclockid(3)
        return found
