"""What this machine is."""

from __future__ import annotations

import platform
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
