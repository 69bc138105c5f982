"""Which call of the host each piece of a device's work came from.

The two share a correlation id, which is unique within one process. A file may hold several processes, ranks
or nodes whose ids are the same numbers, and work does not always say whose it is. What can't be told stays
open: a wrong pair is a wrong latency that looks like a right one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from overlap_bench.harness.trace import events
from overlap_bench.harness.trace.events import NONE, Codes, Flags, Times


@dataclass(frozen=True, slots=True)
class Ids:
    """What calls, pieces of work, or waits are joined by. `process`: NONE where it is not known. `thread`: or
    the stream."""

    process: Codes
    correlation: Times
    thread: Codes
    start: Times
    end: Times

    def only(self, rows: NDArray[np.bool_] | Times) -> Ids:
        return Ids(*(getattr(self, name)[rows] for name in Ids.__slots__))


@dataclass(frozen=True, slots=True)
class Pairs:
    """For each piece of work the row of its call, NONE without one. `untold`: there are calls with its id,
    and which it came from cannot be told. `early`: it begins before the only call that it could be from."""

    call: Times
    untold: Flags
    early: Flags


def of_work(calls: Ids, work: Ids, device: Codes, many: Flags) -> Pairs:
    """What launched each piece of work. `many`: calls that several devices' work may come from, as graph
    launches."""
    call, untold = _joined(calls, work)
    single = (call != NONE) & ~events.take(many, call, 0).astype(bool)
    unknown = np.flatnonzero(single & (work.process == NONE))
    untold[unknown] |= _on_several(work.correlation[unknown], device[unknown])
    early = ~untold & (call != NONE) & (work.start < events.take(calls.start, call, 0))
    return Pairs(np.where(untold | early, NONE, call), untold, early)


def of_waits(calls: Ids, waits: Ids) -> Times:
    """The call that each wait is part of, NONE where that cannot be told."""
    call, untold = _joined(calls, waits)
    return np.where(untold, NONE, call)


def of_flows(key: Times, starts: Flags) -> Times:
    """For each end of an arrow the row that it begins at, NONE where that cannot be told, and of beginnings.
    Two processes may give the same key to theirs."""
    begins, ends = np.flatnonzero(starts), np.flatnonzero(~starts)
    row, several = _matched(key[begins], key[ends])
    result = np.full(len(key), NONE, np.int64)
    result[ends] = events.take(begins, np.where(several, NONE, row), NONE)
    return result


def _joined(calls: Ids, work: Ids) -> tuple[Times, Flags]:
    """A call that has the id of each, and whether there are several. What has no process is joined by its id
    alone."""
    call, several = np.full(len(work.start), NONE, np.int64), np.zeros(len(work.start), bool)
    for process in np.unique(work.process).tolist():
        wanted = np.flatnonzero((work.process == process) & (work.correlation != NONE))
        own = (calls.process == process) | (process == NONE)
        rows = _outermost(calls, np.flatnonzero(own & (calls.correlation != NONE)))
        row, several[wanted] = _matched(calls.correlation[rows], work.correlation[wanted])
        call[wanted] = events.take(rows, row, NONE)
    return call, several


def _outermost(calls: Ids, rows: Times) -> Times:
    """The rows without calls that are within one of the same id and thread, as a driver's within the
    runtime's."""
    twice = rows[pd.Series(calls.correlation[rows]).duplicated(keep=False)]
    found = calls.only(twice)
    order = np.lexsort((-found.end, found.start, found.thread, found.correlation, found.process))
    outer, inner = found.only(order[:-1]), found.only(order[1:])
    within = (outer.correlation == inner.correlation) & (outer.thread == inner.thread)
    within &= (outer.process == inner.process) & (outer.end >= inner.end)
    return np.setdiff1d(rows, twice[order[1:][within]], assume_unique=True)


def _matched(keys: Times, wanted: Times) -> tuple[Times, Flags]:
    """The first row of equal key for each, NONE where none has it, and whether there are more."""
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    places = pd.Index(distinct).get_indexer(wanted)
    return events.take(first, places, NONE), events.take(counts, places, 0) > 1


def _on_several(correlation: Times, device: Codes) -> Flags:
    devices = pd.Series(device).groupby(correlation)
    several: Flags = (devices.transform("min") != devices.transform("max")).to_numpy()
    return several
