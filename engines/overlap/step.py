"""One step in flight: its batch, and how far the device and the launching thread have come with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from overlap_bench.engines.devices.base import Event
from overlap_bench.engines.overlap.batch import Batch


@dataclass(slots=True, eq=False)
class Step:
    """Made by the scheduler's thread, filled in by whichever thread launches it.

    `staged` is the metadata as the h2d toggle staged it; `handed_over_ns` is when a forward thread was given
    the step (-1 where there is none). `launch_done` is set once the program is launched; `copy_done` is the
    device's event behind the copy of the sampled ids (None where d2h blocks).
    """

    number: int
    batch: Batch
    staged: Any
    handed_over_ns: int = -1
    launch_done: threading.Event = field(default_factory=threading.Event)
    copy_done: Event | None = None
