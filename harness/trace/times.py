"""Times that were never taken, and events that never ended: found, counted, and left out.

A profiler that could not take a time writes 0, or nothing, and one that ends before an event does writes a
duration of -1 or an end of 0. Taken at its word, one such event makes a trace of a second last 50 years.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_bench.harness.trace.events import Flags, Times

UNTAKEN = int(np.iinfo(np.int64).min)  # in place of a time that is missing or no number
FARTHEST = int(2.5e18)  # ns from 0, in the year 2049: sums of three still fit into 64 bits
SECOND = 10**9
ZERO = 1000  # ns from 0 that are one with it: -1 us is no better a time
DAY = 24 * 3600 * SECOND
# So many times the length of all else must lie between it and a time that is taken for none.
APART = 10
FEW, FEWEST = 0.1, 3  # of all events: where more are that far away, they have another clock
# The clock's 0 may be a trace's first time. A range may be followed by a long silence; a call or work is not.
SILENCE = {"ranges": 3600 * SECOND}
SHORT_SILENCE = SECOND // 10

Span = tuple[Times, Times]  # starts and ends
# Between which all times lie, and how far from 0 the first other one is, if that is far: else 0.
Bounds = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Faults:
    """Rows of one table that are to be left out."""

    untaken: Flags
    unfinished: Flags


def faults(tables: Mapping[str, Span]) -> dict[str, Faults]:
    """What is to be left out of each table that has something of it. What is odd shows among all."""
    filled = {name: span for name, span in tables.items() if len(span[0])}
    bounds = _bounds(list(filled.values()))
    found = {
        name: _of_table(*span, bounds, SILENCE.get(name, SHORT_SILENCE)) for name, span in filled.items()
    }
    return {name: each for name, each in found.items() if each is not None}


def near_zero(times: Times) -> Flags:
    return (times >= -ZERO) & (times <= ZERO)


def _of_table(start: Times, end: Times, bounds: Bounds, silence: int) -> Faults | None:
    low, high, from_zero = bounds
    untaken = (start < low) | (start > high) | (end > high)
    # What took no time at 0 is none either: whatever a device or a call does takes some.
    untaken |= (start == 0) & (end == 0)
    if from_zero > silence:
        untaken |= near_zero(start)
    unfinished = (end < start) & ~untaken
    return Faults(untaken, unfinished) if (untaken | unfinished).any() else None


def _bounds(spans: Sequence[Span]) -> Bounds:
    """The part of all time that few starts are far from and all others near, if there is one."""
    low, high = -FARTHEST, FARTHEST
    starts = np.concatenate([np.empty(0, np.int64), *(_taken(start, low, high) for start, _ in spans)])
    if len(starts) and int(starts.max()) - int(starts.min()) > DAY:
        quartiles = np.percentile(starts, 25, method="higher"), np.percentile(starts, 75, method="lower")
        lower, upper = sorted(map(int, quartiles))
        margin = max(DAY, APART * (upper - lower))
        near = _taken(starts, lower - margin, upper + margin)
        far = len(starts) - len(near)
        if far <= max(FEW * len(starts), FEWEST) and 2 * far < len(starts):
            low, high, starts = lower - margin, upper + margin, near
    first, last = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
    if last - first <= DAY:
        high = min(high, last + DAY)
    length = max((int(_taken(end, low, high).max(initial=first)) for _, end in spans), default=first) - first
    return low, high, first if first > APART * length else 0


def _taken(times: Times, low: int, high: int) -> Times:
    """Times between these, without 0."""
    return times[(times >= low) & (times <= high) & ~near_zero(times)]
