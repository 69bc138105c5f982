"""When requests are due. To add a kind of arrival, add a function and a line in ARRIVALS here: what checks
it, and what offers it, read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlap_bench.engines.api import BadSetting

if TYPE_CHECKING:
    import numpy as np

Workload = Any  # of workload.py, which reads ARRIVALS for its help, and so can't be named here
UNTIMED = -1  # due after something that happens in the round: a request was sent, a place became free
SCHEDULES = ("absolute", "relative")
NS_PER_S = 1e9
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Arrival:
    """`options`: the timing options of a Workload that it looks at; `needs`: those that it can't do without;
    `offsets`: when each request is due, in ns after the round's start, not decreasing, or UNTIMED;
    `open_loop`: requests are spread over time, whatever the engine does, so throughput is what was asked."""

    options: tuple[str, ...]
    offsets: Callable[[Workload, np.random.Generator], list[int]]
    needs: tuple[str, ...] = ()
    open_loop: bool = True


def fixed(workload: Workload, random: np.random.Generator) -> list[int]:
    """One request every `interval_ms`: by the clock (absolute), or after the one before was sent (relative),
    which waits for a stall and sends less (coordinated omission): only the absolute one shows what a stall
    costs."""
    if workload.arrival_schedule == "relative":
        return [0] + [UNTIMED] * (workload.num_requests - 1)
    return [index * workload.interval_ns for index in range(workload.num_requests)]


def gamma(workload: Workload, random: np.random.Generator) -> list[int]:
    """Independent intervals from a gamma distribution of shape `burstiness` and mean 1/rate: `vllm bench
    serve`'s definition. Their CV is 1/sqrt(burstiness): 1 is a Poisson process, less comes in bursts, more
    is even.

    Unlike there, the first request is due at once, and a round is not stretched to last exactly
    num_requests/rate: both arms get the same arrivals, so luck with the rate cancels between them.
    """
    gaps = random.standard_gamma(workload.burstiness, workload.num_requests - 1) / workload.burstiness
    return _after(gaps / rates(workload)[1:])


def constant(workload: Workload, random: np.random.Generator) -> list[int]:
    """Evenly at `rate`, be it one that grows: the "constant" of GuideLLM and AIPerf, and the limit of vLLM's
    burstiness where it is large."""
    return _after(1 / rates(workload)[1:])


def _after(intervals: np.ndarray) -> list[int]:
    """Due times from the intervals between them, s."""
    import numpy as np

    return [0, *np.cumsum(intervals * NS_PER_S).round().astype(np.int64).tolist()]


def rates(workload: Workload) -> np.ndarray:
    """The rate at which each request arrives, per second: float64 [num_requests].

    With a ramp-up it grows linearly from request to request, from START at the first to `rate` at the last,
    as in `vllm bench serve --ramp-up-strategy linear`, or at the REQUESTS-th where the ramp says so.
    """
    import numpy as np

    assert workload.rate is not None
    if workload.ramp_up is None:
        return np.full(workload.num_requests, workload.rate)
    start, count = parse_ramp(workload.ramp_up)
    last = (count or workload.num_requests) - 1
    progress = np.minimum(1.0, np.arange(workload.num_requests) / max(1, last))
    grown: np.ndarray = start + (workload.rate - start) * progress
    return grown


def parse_ramp(text: str) -> tuple[float, int | None]:
    """ "2" or "2:16": the rate to start from, and the number of requests until the full rate is reached, None
    for all of them. Raises BadSetting."""
    start, _, count = text.partition(":")
    try:
        rate, requests = float(start), int(count) if count else None
    except ValueError:
        raise BadSetting(f"ramp_up needs START or START:REQUESTS, not '{text}'") from None
    if not 0 < rate < math.inf:
        raise BadSetting(f"ramp_up must start from a rate above 0, not {start}")
    if requests is not None and requests < 2:
        raise BadSetting(f"ramp_up needs at least 2 requests to reach the full rate, not {requests}")
    return rate, requests


def burst(workload: Workload, random: np.random.Generator) -> list[int]:
    return [0] * workload.num_requests


def closed(workload: Workload, random: np.random.Generator) -> list[int]:
    """`concurrency` requests in flight; the next one is due when one of them ends."""
    return [UNTIMED] * workload.num_requests


def trace(workload: Workload, random: np.random.Generator) -> list[int]:
    """When they came in the trace, counted from its first request; with a `rate` stretched or squeezed so
    that they come at that rate on average. A trace that is shorter than num_requests ends early."""
    from overlap_bench.harness.workload import traces

    assert workload.trace is not None
    entries = traces.read(workload.trace, workload.num_requests).entries
    start, span = entries[0].at_ms, entries[-1].at_ms - entries[0].at_ms
    stretch = 1.0
    if workload.rate is not None and span > 0:
        stretch = (len(entries) - 1) / workload.rate * NS_PER_S / NS_PER_MS / span
    return [round((entry.at_ms - start) * stretch * NS_PER_MS) for entry in entries]


ARRIVALS: Mapping[str, Arrival] = {
    "fixed": Arrival(("interval_ms", "arrival_schedule"), fixed),
    "poisson": Arrival(("rate", "ramp_up"), gamma, ("rate",)),
    "gamma": Arrival(("rate", "burstiness", "ramp_up"), gamma, ("rate",)),
    "constant": Arrival(("rate", "ramp_up"), constant, ("rate",)),
    "burst": Arrival((), burst, open_loop=False),
    "closed": Arrival(("concurrency",), closed, ("concurrency",), open_loop=False),
    "trace": Arrival(("trace", "trace_scale", "rate"), trace, ("trace",)),
}


def using(option: str) -> str:
    """The arrivals that look at a timing option, as one reads them."""
    *some, last = (name for name, arrival in ARRIVALS.items() if option in arrival.options)
    return f"{', '.join(some)} or {last}" if some else last


TIMING_OPTIONS = sorted({option for arrival in ARRIVALS.values() for option in arrival.options})
