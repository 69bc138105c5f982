"""The longest times in which a device had nothing to do, and what the host did meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np

from overlap_bench.harness.trace import events
from overlap_bench.harness.trace.events import NONE, Flags, Table, Times, Trace

MOST = 5  # of each device
NOTHING = "nothing that the trace has"
UNTOLD = "which thread launched what followed cannot be told"
CALLED = ("step", "iteration", "iter")
# What marks a step, behind its NVTX domain: torch.profiler's, what people call it in NVTX, with its number
# first, and our phase that each step has once. The first that there is counts alone: an `iteration 3` may
# hold a `step` of the optimizer's.
STEPS = tuple(
    map(
        re.compile,
        (
            r"ProfilerStep#\d+",
            *(rf"(?i:{name})\W*\d+" for name in CALLED),
            *(rf"(?i:{name})\W*" for name in CALLED),
            r"launch",
        ),
    )
)


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """`at_ms`: since the trace began. `host`: the call and the range that the host's thread was in."""

    device: str
    at_ms: float
    length_us: float
    host: str


def gaps(trace: Trace) -> list[Gap]:
    """The gaps of each device, the longest first."""
    return [gap for device in range(len(trace.devices)) for gap in _of_device(trace, device)]


def steps(trace: Trace) -> int | None:
    """How many steps the trace's ranges mark, on the thread that marks most; None where none are."""
    for marks in STEPS:
        codes = [code for code, name in enumerate(trace.names) if marks.fullmatch(name.rpartition("/")[2])]
        threads = trace.ranges.thread[np.isin(trace.ranges.name, codes)]
        if len(threads):
            return int(np.bincount(threads).max())
    return None


def _of_device(trace: Trace, device: int) -> Iterator[Gap]:
    work = trace.work
    rows = np.flatnonzero(work.device == device)
    rows = rows[np.argsort(work.start[rows], kind="stable")]
    idle_from = np.maximum.accumulate(work.end[rows])[:-1]
    lengths = work.start[rows[1:]] - idle_from
    first, _ = trace.span()
    for place in np.argsort(-lengths, kind="stable")[:MOST].tolist():
        if lengths[place] > 0:
            begin, until = int(idle_from[place]), int(work.start[rows[place + 1]])
            yield Gap(
                device=trace.devices[device],
                at_ms=(begin - first) / 1e6,
                length_us=(until - begin) / 1e3,
                host=(
                    UNTOLD
                    if device in trace.untold
                    else _host(trace, begin, until, int(work.call[rows[place + 1]]))
                ),
            )


def _host(trace: Trace, begin: int, until: int, call: int) -> str:
    """What took most of that time on the thread that launched what ended it; on any thread where the trace
    does not say which. A call counts that took half of it or more."""
    calls, ranges = trace.calls, trace.ranges
    thread = NONE if call == NONE else int(calls.thread[call])
    here = np.ones(len(calls.start), bool) if thread == NONE else calls.thread == thread
    longest, took = _longest(calls, here, begin, until)
    said, middle = "", (begin + until) // 2
    if 2 * took >= until - begin:
        length_us = (calls.end[longest] - calls.start[longest]) / 1e3
        said = f"{trace.names[calls.name[longest]]} ({length_us:,.0f} us)"
        thread = int(calls.thread[longest])
        middle = (max(begin, int(calls.start[longest])) + min(until, int(calls.end[longest]))) // 2
    around = (ranges.start <= middle) & (ranges.end > middle)
    if thread != NONE:
        around &= ranges.thread == thread
    rows = np.flatnonzero(around)
    if not len(rows):
        return said or NOTHING
    inner = rows[np.argmin(ranges.end[rows] - ranges.start[rows])]
    inside = trace.names[ranges.name[inner]]
    return f"{said} in {inside}" if said else f"{inside}, in no long call"


def _longest(table: Table, chosen: Flags, begin: int, until: int) -> tuple[int, int]:
    """The row that covers most of [begin, until), and how much."""
    rows: Times = np.flatnonzero(chosen & (table.start < until) & (table.end > begin))
    if not len(rows):
        return events.NONE, 0
    covered = np.minimum(table.end[rows], until) - np.maximum(table.start[rows], begin)
    best = int(np.argmax(covered))
    return int(rows[best]), int(covered[best])
