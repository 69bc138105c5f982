"""Sets of intervals in sorted arrays: unions, gaps, how much of one lies in another, what encloses a time.

Intervals are half-open [start, end), int64 nanoseconds. Nothing here loops over rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Times = NDArray[np.int64]
NONE = -1


def union(starts: Times, ends: Times) -> tuple[Times, Times]:
    """The same time as disjoint intervals, in order; neighbours that touch become one."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)  # latest end so far
    first = np.r_[True, starts[1:] > reach[:-1]]
    last = np.r_[first[1:], True]
    return starts[first], reach[last]


def length(starts: Times, ends: Times) -> int:
    """Time that is in at least one of them, ns."""
    starts, ends = union(starts, ends)
    return int((ends - starts).sum())


def covered(starts: Times, ends: Times, low: Times, high: Times) -> Times:
    """For each window [low, high) how much of it a union covers; `starts` and `ends` are a union's. A window
    that ends before it starts is empty."""
    if not len(starts):
        return np.zeros(len(low), np.int64)
    before = np.r_[0, np.cumsum(ends - starts)]  # time covered before each interval, and in all

    def until(times: Times) -> Times:
        place = np.searchsorted(starts, times, side="right")
        inside = np.minimum(times, ends[place - 1]) - starts[place - 1]
        return np.where(place == 0, 0, before[place - 1] + inside)

    return np.where(high > low, until(high) - until(low), 0)


def innermost(starts: Times, ends: Times, times: Times) -> Times:
    """For each time the row of the innermost interval that holds it, NONE where none does. The intervals
    nest or are disjoint, as ranges that one thread pushed and popped.

    Walking along all borders in order, depth is the number of intervals open. The one on top after a border
    is the latest that opened to that very depth: those that opened to it before are closed, or depth would
    be larger. So one sort by (depth, order) and a running maximum find the top after every border.
    """
    asked = np.sort(times)
    # Most ranges hold none of the times; without them little is left to sort.
    rows = np.flatnonzero(np.searchsorted(asked, starts) < np.searchsorted(asked, ends))
    if not len(rows):
        return np.full(len(times), NONE, np.int64)
    starts, ends = starts[rows], ends[rows]
    count = len(rows)
    at = np.concatenate((starts, ends))
    opens = np.r_[np.ones(count, np.int8), np.zeros(count, np.int8)]
    # At one time ends come before starts, and of starts the longest, which is the outermost, first.
    order = np.lexsort((-np.concatenate((ends, ends)), opens, at))
    at, opened = at[order], opens[order] == 1
    depth = np.cumsum(np.where(opened, 1, -1))
    by_depth = np.argsort(depth, kind="stable")
    latest = np.maximum.accumulate(np.where(opened[by_depth], np.arange(2 * count), NONE))
    on_top = np.empty(2 * count, np.int64)
    on_top[by_depth] = rows[order[by_depth[latest]] % count]
    on_top[depth == 0] = NONE
    place = np.searchsorted(at, times, side="right") - 1
    return np.where(place < 0, NONE, on_top[place])
