"""What this machine is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

CPUINFO = Path("/proc/cpuinfo")
CPU_NAMES = ("model name", "Model", "Hardware", "cpu model", "cpu")  # x86; ARM boards; MIPS; POWER
UNKNOWN = "unknown"
Found = TypeVar("Found")
Otherwise = TypeVar("Otherwise")


def known(ask: Callable[..., Found], otherwise: Otherwise, *given: object) -> Found | Otherwise:
    """What the machine tells of itself when it is asked (with `given`), or `otherwise`. For what a record
    holds and no measurement needs: whatever is raised, as of a masked file or a driver's name in bytes that
    are no text, ends no run."""
    try:
        return ask(*given)
    except Exception:
        return otherwise


def cpu_model() -> str:
    """The processor as the kernel names it, else the architecture."""
    text = known(CPUINFO.read_text, "", "utf-8", "replace")
    told = {
        name.strip(): value.strip() for name, _, value in (each.partition(":") for each in text.split("\n"))
    }
    return next((told[name] for name in CPU_NAMES if told.get(name)), "") or platform.machine() or UNKNOWN


def move_threads(cores: set[int]) -> None:
    """All threads of this process: libraries have some of their own, such as ZeroMQ's, which would run on any
    core."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
