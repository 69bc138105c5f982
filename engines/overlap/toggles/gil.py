"""gil: how long a thread may keep the interpreter while another one waits for it.

Before (`default`): CPython's switch interval of 5 ms. After (`fast-switch`): 50 us, for the engine's process
and for as long as it serves. It matters where the scheduler's thread computes while the forward thread has
something to launch: each time the forward thread gives the interpreter up (a system call does), it may have
to wait for an interval to get it back.

Claim: measured for this project, a thread fed by a queue.Queue, from put to launched: 0.02 ms where the
other thread waits, 2.02 ms where it computes for 2 ms instead, 0.15 ms in that case at a 50 us interval.

What can go wrong: the interval holds for every thread of the process, and a switch costs either thread its
caches. Where both compute all the time they only take turns more often.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="gil",
    module=__name__,
    choices=("default", "fast-switch"),
    changes="the interpreter's switch interval while two threads share it: 5 ms, or 50 us",
    source="CPython's sys.setswitchinterval; put to launched 2.02 -> 0.15 ms in a measurement of two threads",
    requires={"*": {"schedule": ("overlap",), "launch": ("thread",)}},
    counters=("launch_lag_ns", "switch_interval_ns"),
)

FAST_SWITCH_S = 50e-6


@contextmanager
def switch_fast(loop: object = None) -> Iterator[None]:
    """After."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(FAST_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def count_launch_lag(counters: dict[str, int], step: Step) -> None:
    """On the forward thread, after a step's last command: add how long ago the step was handed over, and the
    interval in force. Both once per step, so that dividing by steps gives their means."""
    counters["launch_lag_ns"] += perf_counter_ns() - step.handed_over_ns
    counters["switch_interval_ns"] += round(sys.getswitchinterval() * 1e9)


SERVING: dict[str, Callable[..., AbstractContextManager[None]]] = {
    "default": nullcontext,
    "fast-switch": switch_fast,
}
