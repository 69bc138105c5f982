"""What this machine is."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def cpu_model() -> str:
    """The processor as /proc/cpuinfo names it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def move_threads(cores: set[int]) -> None:
    """All threads of this process: libraries have some of their own, such as ZeroMQ's, which would run on any
    core."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
