"""When requests are due. A way of arriving is one function and one line in ARRIVALS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.workload import Workload

UNTIMED = -1  # due after something that happens in the round: a request was sent, a place became free
SCHEDULES = ("absolute", "relative")


@dataclass(frozen=True, slots=True)
class Arrival:
    """`options`: the timing options of a Workload that mean something with this way of arriving.

    `offsets` gives each request's due time in ns after the round's start, not decreasing, or UNTIMED.
    """

    options: tuple[str, ...]
    offsets: Callable[[Workload], list[int]]


def fixed(workload: Workload) -> list[int]:
    """One request every `interval_ms`: by the clock (absolute), or after the one before was sent (relative).

    Only the absolute schedule shows what a stall costs: a relative one waits for the stall and sends less
    (coordinated omission).
    """
    if workload.arrival_schedule == "relative":
        return [0] + [UNTIMED] * (workload.num_requests - 1)
    return [index * workload.interval_ns for index in range(workload.num_requests)]


def burst(workload: Workload) -> list[int]:
    """Everything at once."""
    return [0] * workload.num_requests


def closed(workload: Workload) -> list[int]:
    """`concurrency` requests in flight; the next one is due when one of them ends."""
    return [UNTIMED] * workload.num_requests


ARRIVALS: Mapping[str, Arrival] = {
    "fixed": Arrival(("interval_ms", "arrival_schedule"), fixed),
    "burst": Arrival((), burst),
    "closed": Arrival(("concurrency",), closed),
}
TIMING_OPTIONS = sorted({option for arrival in ARRIVALS.values() for option in arrival.options})
