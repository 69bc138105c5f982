"""Which call of the host each piece of a device's work came from.

The two share a correlation id, which is unique within one process. A file may hold several processes, ranks
or nodes whose ids are the same numbers, and work does not always say whose it is. What the file says decides;
else what cannot be otherwise: no work begins before its call, and two devices share no call. What is still
open stays open: a wrong pair is a wrong latency that looks like a right one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from overlap_bench.harness.trace import events
from overlap_bench.harness.trace.events import NONE, Codes, Flags, Times

ID_BITS = 32  # of CUPTI's ids
ENOUGH = 0.5  # of the ids that two sets could share
ODD = 0.01  # of pairs: so many decide nothing


@dataclass(frozen=True, slots=True)
class Ids:
    """What calls, pieces of work, or waits are joined by. `process`: NONE where it is not known. `thread`: or
    the stream. `place`: where in the file each is, by which files that were put behind each other show."""

    process: Codes
    correlation: Times
    thread: Codes
    start: Times
    end: Times
    place: Times

    def only(self, rows: NDArray[np.bool_] | Times) -> Ids:
        return Ids(*(getattr(self, name)[rows] for name in Ids.__slots__))


@dataclass(frozen=True, slots=True)
class Pairs:
    """For each piece of work the row of its call, NONE without one. `process`: the one it is of, NONE where
    it cannot be told. `untold`: there are calls with its id, and which it came from cannot be told. `early`:
    it begins before the only call that it could be from."""

    call: Times
    process: Codes
    untold: Flags
    early: Flags


def of_work(calls: Ids, work: Ids, device: Codes, many: Flags) -> Pairs:
    """What launched each piece of work. `device`: its work is one process's as a rule. `many`: calls that
    more than one piece of work comes from, as graph launches."""
    process = work.process.copy()
    unknown = np.flatnonzero((process == NONE) & (work.correlation != NONE))
    if len(unknown):
        process[unknown] = _owners(calls, work.only(unknown), device[unknown], many)
    call, untold = _joined(calls, work, process, device)
    early = (call != NONE) & (work.start < events.take(calls.start, call, 0))
    return Pairs(np.where(early, NONE, call), process, untold, early)


def of_waits(calls: Ids, waits: Ids) -> Times:
    """The call that each wait is part of, NONE where that cannot be told."""
    return _joined(calls, waits, waits.process, None)[0]


def of_flows(key: Times, thread: Codes, at: Times, starts: Flags) -> Times:
    """For each end of an arrow the row that it begins at, NONE where that cannot be told, and of beginnings.
    Two processes may give the same key to theirs."""
    _, code = np.unique(key, return_inverse=True)
    unowned = np.full(len(at), NONE, np.int32)
    found = Ids(unowned, code, thread, at, at, np.zeros_like(at))
    begins, ends = np.flatnonzero(starts), np.flatnonzero(~starts)
    one = np.zeros(len(ends), np.int32)
    row, _ = _joined(found.only(begins), found.only(ends), unowned[ends], one)
    result = np.full(len(at), NONE, np.int64)
    result[ends] = events.take(begins, row, NONE)
    return result


# ---------------------------------------------------------------------------------------------------------
# By id


def _joined(calls: Ids, work: Ids, process: Codes, device: Codes | None) -> tuple[Times, Flags]:
    """The call of each, and whether that is untold. What has no process is joined by its id alone. Waits have
    no `device`."""
    call, untold = np.full(len(process), NONE, np.int64), np.zeros(len(process), bool)
    owned, known = process != NONE, work.correlation != NONE
    chosen = np.flatnonzero(owned & known)
    alone = np.zeros(len(chosen), bool)
    call[chosen], untold[chosen] = _decided(calls, work.only(chosen), process[chosen], alone, device is None)
    chosen = np.flatnonzero(~owned & known)
    if len(chosen):
        # A call whose work is known is no other's.
        free = np.flatnonzero(~np.isin(np.arange(len(calls.start)), call))
        nobodys = replace(calls.only(free), process=np.full(len(free), NONE, np.int32))
        several = np.zeros(len(process), bool) if device is None else _on_several(work.correlation, device)
        row, untold[chosen] = _decided(
            nobodys, work.only(chosen), process[chosen], several[chosen], device is None
        )
        call[chosen] = events.take(free, row, NONE)
    return call, untold


def _decided(calls: Ids, work: Ids, process: Codes, several: Flags, waits: bool) -> tuple[Times, Flags]:
    """The call of each, and whether there is one and it cannot be told. `several`: ids on several devices."""
    if not len(process) or not len(calls.start):
        return np.full(len(process), NONE, np.int64), np.zeros(len(process), bool)
    keys, wanted = _keys(calls.process, calls.correlation, process, work.correlation)
    found, contested = _matched(keys, wanted)
    contested |= several & (found != NONE)
    if contested.any():
        decide = _around if waits else _in_turn
        found[contested] = decide(calls, keys, work.only(contested), wanted[contested], several[contested])
    return found, contested & (found == NONE)


def _keys(
    process: Codes, correlation: Times, wanted_process: Codes, wanted_correlation: Times
) -> tuple[Times, Times]:
    """One number for each pair of process and id."""
    if max(int(correlation.max()), int(wanted_correlation.max())) >> ID_BITS:
        _, codes = np.unique(np.concatenate([correlation, wanted_correlation]), return_inverse=True)
        correlation, wanted_correlation = codes[: len(correlation)], codes[len(correlation) :]
    return (
        (process.astype(np.int64) << ID_BITS) + correlation,
        (wanted_process.astype(np.int64) << ID_BITS) + wanted_correlation,
    )


def _matched(keys: Times, wanted: Times) -> tuple[Times, Flags]:
    """The first row of equal key for each, and whether there are more."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    place = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    found = ordered[place] == wanted
    following = np.minimum(place + 1, len(keys) - 1)
    more = found & (following > place) & (ordered[following] == wanted)
    return np.where(found, order[place], NONE), more


def _on_several(correlation: Times, device: Codes) -> Flags:
    """Whether work of more than one device has the id."""
    order = np.lexsort((device, correlation))
    ids, devices = correlation[order], device[order]
    another = (ids[1:] == ids[:-1]) & (devices[1:] != devices[:-1])
    return np.isin(correlation, ids[1:][another])


def _contested(calls: Ids, keys: Times, wanted: Times) -> Times:
    """Rows of the calls that have one of these keys, in order of key and start."""
    rows = np.flatnonzero(np.isin(keys, wanted))
    return _outermost(calls, rows[np.lexsort((calls.start[rows], keys[rows]))], keys)


def _outermost(calls: Ids, rows: Times, keys: Times) -> Times:
    """The rows, in order of key and start, without calls that are within one of the same key and thread."""
    before, after = rows[:-1], rows[1:]
    inside = (keys[before] == keys[after]) & (calls.thread[before] == calls.thread[after])
    inside &= calls.end[after] <= calls.end[before]
    return rows[np.r_[True, ~inside]]


def _in_turn(calls: Ids, keys: Times, work: Ids, wanted: Times, several: Flags) -> Times:
    """The call of each piece of work as time tells it: the only one before it, where its id is of one device;
    or where all with that key take turns, a call and then its work."""
    rows = _contested(calls, keys, wanted)
    keys = keys[rows]
    order = np.lexsort((work.start, wanted))
    _, firsts, counts = np.unique(keys, return_index=True, return_counts=True)
    _, code, works = np.unique(wanted[order], return_inverse=True, return_counts=True)
    begun = work.start[order]
    starts = np.r_[calls.start[rows], 0]  # and one place behind the last
    turn = np.arange(len(order)) - np.r_[0, np.cumsum(works)][code]

    def fits(turn: Times) -> Flags:
        """Whether the call of that turn has begun, and the next one has not."""
        place = np.minimum(firsts[code] + turn, len(rows) - 1)
        over = (turn + 1 < counts[code]) & (starts[place + 1] <= begun)
        fitting: Flags = (turn < counts[code]) & (starts[place] <= begun) & ~over
        return fitting

    in_turn = (works == counts) & (np.bincount(code, ~fits(turn), len(works)) == 0)
    first = fits(np.zeros_like(turn)) & ~several[order]
    place = firsts[code] + np.where(in_turn[code], turn, 0)
    result = np.full(len(order), NONE, np.int64)
    result[order] = np.where(in_turn[code] | first, rows[np.minimum(place, len(rows) - 1)], NONE)
    return result


def _around(calls: Ids, keys: Times, waits: Ids, wanted: Times, _: Flags) -> Times:
    """The only call with the key of each wait that it is within."""
    rows = _contested(calls, keys, wanted)
    keys = keys[rows]
    result = np.full(len(wanted), NONE, np.int64)
    holding = np.zeros(len(wanted), np.int64)
    first = np.searchsorted(keys, wanted)
    for step in range(int(np.unique(keys, return_counts=True)[1].max())):
        place = np.minimum(first + step, len(rows) - 1)
        call = rows[place]
        holds = (first + step < len(rows)) & (keys[place] == wanted)
        holds &= (calls.start[call] <= waits.start) & (waits.end <= calls.end[call])
        holding += holds
        result = np.where(holds, call, result)
    return np.where(holding == 1, result, NONE)


# ---------------------------------------------------------------------------------------------------------
# By process


def _owners(calls: Ids, work: Ids, group: Codes, many: Flags) -> Codes:
    """The process of each piece of work, as its whole group's shows; NONE where it does not."""
    processes = np.unique(calls.process)
    groups, code = np.unique(group, return_inverse=True)
    if len(processes) < 2 and (not len(processes) or len(groups) < 2):
        return np.full(len(group), processes[0] if len(processes) else NONE, np.int32)
    of_many = np.unique(calls.correlation[many])
    mixed = [each for each in range(len(groups)) if _mixed(work.correlation[code == each], of_many)]
    if mixed and len(processes) > 1:  # of two processes, then: take it apart by its streams
        group = np.where(np.isin(code, mixed), len(groups) + work.thread.astype(np.int64), code)
        groups, code = np.unique(group, return_inverse=True)
    shared, early = _overlap(calls, work, code, processes, len(groups))
    candidates = (shared > 0) & (shared >= ENOUGH * shared.max(axis=1, keepdims=True))
    for place, process in enumerate(processes.tolist()):  # which may be two of the same number
        candidates[:, place] &= not _mixed(calls.correlation[calls.process == process], of_many)
    several = candidates.sum(axis=1) > 1
    ids = [_once(work.correlation[code == each], of_many) for each in range(len(groups))]
    for each in np.flatnonzero(several):
        candidates[each] &= not _mixed(work.correlation[code == each], of_many)
    beside = _neighbours(calls, work, code, processes, candidates & (early <= ENOUGH * shared))
    possible = candidates & ((early <= ODD * shared) | ~several[:, None])
    owner = _without_clashes(_eliminated(_without_clashes(beside, ids), possible, ids), ids)
    return np.where(owner == NONE, NONE, processes[owner]).astype(np.int32)[code]


def _overlap(
    calls: Ids, work: Ids, code: Times, processes: Codes, groups: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For each group and process how many pieces of work have an id of its calls, and how many of those begin
    before that call."""
    shared, early = np.zeros((groups, len(processes))), np.zeros((groups, len(processes)))
    for place, process in enumerate(processes.tolist()):
        rows = np.flatnonzero(calls.process == process)
        call = events.take(rows, events.match(work.correlation, calls.correlation[rows]), NONE)
        found = call != NONE
        begins_before = found & (work.start < events.take(calls.start, call, 0))
        shared[:, place] = np.bincount(code[found], minlength=groups)
        early[:, place] = np.bincount(code[begins_before], minlength=groups)
    return shared, early


def _once(correlation: Times, of_many: Times) -> Times:
    """The ids that one process's work has once each."""
    return np.setdiff1d(correlation, of_many)


def _mixed(correlation: Times, of_many: Times) -> bool:
    """Whether ids come twice that one process would give once."""
    single = correlation[~np.isin(correlation, of_many)]
    return len(single) - len(np.unique(single)) > ODD * len(single)


def _eliminated(owner: Times, possible: Flags, ids: list[Times]) -> Times:
    """The process of each group that has one left: what one group's work has called, another's has not."""
    owner, possible, fresh = owner.copy(), possible.copy(), np.flatnonzero(owner != NONE)
    while True:
        for group in fresh:
            for other in np.flatnonzero((owner == NONE) & possible[:, owner[group]]):
                possible[other, owner[group]] = not _clash(ids[group], ids[other])
        fresh = np.flatnonzero((owner == NONE) & (possible.sum(axis=1) == 1))
        if not len(fresh):
            return owner
        owner[fresh] = possible[fresh].argmax(axis=1)


def _neighbours(calls: Ids, work: Ids, code: Times, processes: Codes, candidates: Flags) -> Times:
    """The only candidate of each group whose calls stand where its work does, in a file that was put together
    of one for each process."""

    def spans(key: NDArray[np.int64], place: Times, count: int) -> tuple[Times, Times]:
        first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, NONE, np.int64)
        np.minimum.at(first, key, place)
        np.maximum.at(last, key, place)
        return first, last

    first, last = spans(code, work.place, len(candidates))
    of_calls = np.searchsorted(processes, calls.process)
    first_call, last_call = spans(of_calls, calls.place, len(processes))
    beside = candidates & (first[:, None] <= last_call) & (last[:, None] >= first_call)
    return np.where(beside.sum(axis=1) == 1, beside.argmax(axis=1), NONE)


def _without_clashes(owner: Times, ids: list[Times]) -> Times:
    """NONE for groups that would share their process's calls."""
    owner = owner.copy()
    clashing = {
        each
        for one, other in combinations(range(len(ids)), 2)
        if owner[one] != NONE and owner[one] == owner[other] and _clash(ids[one], ids[other])
        for each in (one, other)
    }
    owner[list(clashing)] = NONE
    return owner


def _clash(one: Times, other: Times) -> bool:
    """Whether two groups have so many ids in common that they are of two processes."""
    return len(np.intersect1d(one, other, assume_unique=True)) > ENOUGH * min(len(one), len(other))
