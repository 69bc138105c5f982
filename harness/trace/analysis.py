"""What a trace says, as small tables: pure functions of events.Trace. What each table means: trace.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from overlap_bench.harness.common import intervals
from overlap_bench.harness.trace import events
from overlap_bench.harness.trace.events import NONE, Coder, Flags, Times, Trace
from overlap_bench.harness.trace.times import UNTAKEN

KIB, MIB = 2**10, 2**20
# Upper bounds. Up to 64 KiB, a copy from pageable memory may return before it is done.
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
SIZE_NAMES = ("to 4 KiB", "to 64 KiB", "to 1 MiB", "to 16 MiB", "to 256 MiB", "larger")
UNKNOWN_SIZE = "unknown"
NUMBERED = re.compile(r"(?i)((?:step|iteration|iter)[ #_:-]*)\d+$")
OUTSIDE, NO_CALL = "(no range)", "(call not in the trace)"
MS, US = 1e6, 1e3  # ns
TIMES = (("count", ""), ("total_ms", "ms"))
SHARED = (*TIMES, ("p50_us", "us"), ("p95_us", "us"), ("share", ""))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a part: what it is about, and its values in the order of the part's measures."""

    key: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A small table. `measures`: (name, unit) of each value, the unit empty for counts and shares.
    `ranked_by`: the measure by which rows are in order, largest first; none where they come by their key."""

    name: str
    title: str
    keys: tuple[str, ...]
    measures: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    note: str
    ranked_by: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Lengths of events that are alike, in ns. `key`: their code."""

    key: int
    count: int
    total: int
    percentiles: tuple[float, ...]


def analyse(trace: Trace, progress: Callable[[str], None] = lambda line: None) -> tuple[Part, ...]:
    """Every part, in the order in which to read them."""
    parts = []
    for function in (devices, ranges, synchronizations, calls, copies, kernels, launches):
        progress(f"analysing {function.__name__}")
        parts.append(function(trace))
    return tuple(parts)


# ---------------------------------------------------------------------------------------------------------
# Ranges and kernels


def ranges(trace: Trace) -> Part:
    found, (first, last) = trace.ranges, trace.span()
    names = Coder()
    alike = np.array([names.code(NUMBERED.sub(r"\1N", each)) for each in trace.names], np.int32)
    rows = [
        Row((names.values[group.key],), (*_times(group), _share(group.total, last - first)))
        for group in grouped(alike[found.name], found.end - found.start, (50, 95))
    ]
    note = (
        "Share: of the trace's length. Nested ranges count each, and so do those of several threads. "
        "Numbered steps are one range."
    )
    return Part("ranges", "Ranges", ("range",), SHARED, tuple(rows), note, ranked_by="total_ms")


def calls(trace: Trace) -> Part:
    found = trace.calls
    rows = [
        Row((trace.names[group.key],), _times(group))
        for group in grouped(found.name, found.end - found.start, (50, 95, 99, 100))
    ]
    measures = (*TIMES, *((f"{name}_us", "us") for name in ("p50", "p95", "p99", "max")))
    note = "What the host asked of the driver; a call that waits takes as long as it waits."
    return Part("calls", "API calls", ("call",), measures, tuple(rows), note, ranked_by="total_ms")


def kernels(trace: Trace) -> Part:
    """By device: of a collective, one device's part may grow and another's shrink."""
    work = trace.work
    chosen = np.isin(work.kind, events.PROGRAMS)
    lengths, names = (work.end - work.start)[chosen], len(trace.names)
    whole = np.bincount(work.device[chosen], lengths, len(trace.devices))
    rows = []
    for group in grouped(work.device[chosen].astype(np.int64) * names + work.name[chosen], lengths, (50, 95)):
        device, name = divmod(group.key, names)
        share = _share(group.total, int(whole[device]))
        rows.append(Row((trace.devices[device], trace.names[name]), (*_times(group), share)))
    note = "Kernels, graph launches and programs. Share: of the time of all of a device's together."
    keys = ("device", "kernel")
    return Part("kernels", "Kernels", keys, SHARED, tuple(rows), note, ranked_by="total_ms")


def _times(group: Group) -> tuple[float, ...]:
    """Count, total in ms, and percentiles in us."""
    return (group.count, group.total / MS, *(each / US for each in group.percentiles))


# ---------------------------------------------------------------------------------------------------------
# Devices


def devices(trace: Trace) -> Part:
    work = trace.work
    window = (int(work.start.min()), int(work.end.max())) if len(work.start) else trace.span()
    in_sync = _synchronized(trace)
    rows = []
    for device, name in sorted(enumerate(trace.devices), key=lambda each: _natural(each[1])):
        here = np.flatnonzero(work.device == device)
        programs = here[np.isin(work.kind[here], events.PROGRAMS)]
        busy = intervals.length(work.start[programs], work.end[programs])
        active = intervals.length(work.start[here], work.end[here])
        told = device not in trace.untold
        idle = idle_split(trace, here, window, in_sync) if told else (None,) * 4
        span = window[1] - window[0]
        rows.append(
            Row(
                (name,),
                (
                    span / MS,
                    busy / MS,
                    _share(busy, span),
                    (active - busy) / MS,
                    (span - active) / MS,
                    *(None if part is None else part / MS for part in idle),
                ),
            )
        )
    return Part(
        "devices",
        "Devices",
        ("device",),
        (
            *(("window_ms", "ms"), ("busy_ms", "ms"), ("busy", ""), ("copy_only_ms", "ms")),
            *(("idle_ms", "ms"), ("host_wait_ms", "ms"), ("sync_wait_ms", "ms"), ("launch_wait_ms", "ms")),
            ("other_ms", "ms"),
        ),
        tuple(rows),
        "Busy: a program ran; copy only: a copy or memset did, and no program. Idle = host wait (the next "
        "launch had not begun) + sync wait (nor could it: its thread sat in a synchronization) + launch wait "
        "(it had begun, and had not returned when the device went idle) + other (queued before, or the trace "
        "lacks the call).",
    )


def idle_split(
    trace: Trace, rows: Times, window: tuple[int, int], in_sync: dict[int, tuple[Times, Times]]
) -> tuple[int, int, int, int]:
    """Idle ns of the device that executed these rows of Work: host wait, sync wait, launch wait, other.
    `in_sync`: when each thread sat in a synchronization, as a union."""
    work = trace.work
    start, end, call = work.start[rows], work.end[rows], work.call[rows]
    called = events.take(trace.calls.start, call, NONE)
    order = np.lexsort((called, start))
    start, end, call = start[order], end[order], call[order]
    idle_from = np.r_[window[0], np.maximum.accumulate(end)]
    after = int(window[1] - idle_from[-1])  # no work ends this gap
    idle_from = idle_from[:-1]
    gaps = np.flatnonzero(start > idle_from)
    begin, until, call = idle_from[gaps], start[gaps], call[gaps]
    known = call != NONE
    began = np.where(known, np.clip(events.take(trace.calls.start, call, NONE), begin, until), begin)
    returned = events.take(trace.calls.end, call, NONE)
    thread = events.take(trace.calls.thread, call, NONE)
    before_call = began - begin
    in_synchronization = np.zeros(len(gaps), np.int64)
    for each in np.unique(thread[known]).tolist():
        if each in in_sync:
            of_it = thread == each
            in_synchronization[of_it] = intervals.covered(*in_sync[each], begin[of_it], began[of_it])
    launching = known & (returned > begin)
    launch = int((until - began)[launching].sum())
    synchronized = int(in_synchronization.sum())
    other = int((until - began)[~launching].sum()) + after
    return int(before_call.sum()) - synchronized, synchronized, launch, other


def _synchronized(trace: Trace) -> dict[int, tuple[Times, Times]]:
    """When each thread sat in a synchronization."""
    found = trace.synchronizations
    blocking = found.blocks & (found.thread != NONE)
    return {
        int(thread): intervals.union(found.start[of_it], found.end[of_it])
        for thread in np.unique(found.thread[blocking])
        for of_it in [blocking & (found.thread == thread)]
    }


# ---------------------------------------------------------------------------------------------------------
# Copies


def copies(trace: Trace) -> Part:
    found = trace.copies
    classes = np.where(found.bytes < 0, len(SIZE_NAMES), np.searchsorted(SIZES, found.bytes, side="left"))
    sizes = (*SIZE_NAMES, UNKNOWN_SIZE)
    names, width = len(trace.names), len(sizes)
    key = (found.direction.astype(np.int64) * names + found.memory) * width + classes
    sums = {group.key: group.total for group in grouped(key, found.bytes, ())}
    rows = []
    for group in grouped(key, found.end - found.start, (50,)):
        pair, size = divmod(group.key, width)
        direction, memory = divmod(pair, names)
        whole = None if sizes[size] == UNKNOWN_SIZE else sums[group.key]
        rate = None if whole is None or not group.total else whole / group.total  # bytes per ns: GB/s
        rows.append(
            Row(
                (trace.names[direction], trace.names[memory], sizes[size]),
                (
                    group.count,
                    None if whole is None else whole / MIB,
                    group.total / MS,
                    group.percentiles[0] / US,
                    rate,
                ),
            )
        )
    return Part(
        "copies",
        "Copies",
        ("direction", "memory", "size"),
        (("count", ""), ("MiB", "MiB"), ("total_ms", "ms"), ("p50_us", "us"), ("gb_per_s", "GB/s")),
        tuple(rows),
        "Memory: the host's side of the copy, if it has one. Size: of one copy.",
        ranked_by="total_ms",
    )


# ---------------------------------------------------------------------------------------------------------
# Synchronizations


def synchronizations(trace: Trace) -> Part:
    found = trace.synchronizations
    around = enclosing(trace)
    kinds = len(trace.names) + 2
    within = np.where(around == NONE, kinds - 2, events.take(trace.ranges.name, around, 0))
    within = np.where(found.thread == NONE, kinds - 1, within)
    names = (*trace.names, OUTSIDE, NO_CALL)
    rows = []
    for group in grouped(
        found.kind.astype(np.int64) * kinds + within, found.end - found.start, (50, 95, 100)
    ):
        kind, inside = divmod(group.key, kinds)
        rows.append(Row((names[kind], names[inside]), _times(group)))
    but = ", but for one that is the wait itself, such as wait.copy_done" if (found.own != NONE).any() else ""
    return Part(
        "synchronizations",
        "Synchronizations",
        ("type", "range"),
        (*TIMES, ("p50_us", "us"), ("p95_us", "us"), ("max_us", "us")),
        tuple(rows),
        f"Range: the innermost that the waiting thread was in{but}. {events.STREAM_WAITS!r} holds up a "
        "stream, not the host: its time is the call's.",
        ranked_by="total_ms",
    )


def enclosing(trace: Trace) -> Times:
    """For each synchronization the innermost range of its thread in which it began; the wait itself, where it
    is a range, does not count. Row in Ranges, or NONE."""
    found, ranges = trace.synchronizations, trace.ranges
    nesting = ranges.nests.copy()
    nesting[found.own[found.own != NONE]] = False
    result = np.full(len(found.start), NONE, np.int64)
    for thread in np.unique(found.thread[found.thread != NONE]):
        here = np.flatnonzero(found.thread == thread)
        rows = np.flatnonzero(nesting & (ranges.thread == thread))
        inner = intervals.innermost(ranges.start[rows], ranges.end[rows], found.called[here])
        result[here] = events.take(rows, inner, NONE)
    return result


# ---------------------------------------------------------------------------------------------------------
# Launches


def launches(trace: Trace) -> Part:
    work = trace.work
    idle = stream_was_idle(trace)
    known = np.flatnonzero(work.call != NONE)
    known = known[np.argsort(work.start[known], kind="stable")]
    first = known[np.unique(work.call[known], return_index=True)[1]]  # of each call, what came first
    latency = work.start[first] - trace.calls.start[work.call[first]]
    rows = []
    for label, chosen in (("any", np.ones(len(first), bool)), ("idle", idle[first])):
        for group in grouped(work.kind[first][chosen], latency[chosen], (50, 95, 99)):
            values = (group.count, *(each / US for each in group.percentiles))
            rows.append(Row((events.WORK_KINDS[group.key], label), values))
    kinds = events.WORK_KINDS
    rows.sort(key=lambda row: (kinds.index(row.key[0]), row.key[1]))
    return Part(
        "launches",
        "Launch to execution",
        ("work", "stream"),
        (("count", ""), ("p50_us", "us"), ("p95_us", "us"), ("p99_us", "us")),
        tuple(rows),
        "From the beginning of the API call to the start of the first work that came from it. Stream idle: "
        "it had finished everything before the call, so no queue is in the time.",
    )


def stream_was_idle(trace: Trace) -> Flags:
    """For each row of Work whether its stream had finished all that started before it when the call that it
    came from began."""
    work = trace.work
    order = np.argsort(work.start, kind="stable")
    streams = work.stream[order]
    reach = pd.Series(work.end[order]).groupby(streams).cummax()
    done = reach.groupby(streams).shift(fill_value=UNTAKEN).to_numpy()
    result = np.empty(len(order), bool)
    result[order] = done <= events.take(trace.calls.start, work.call, UNTAKEN)[order]
    result &= work.call != NONE
    return result


# ---------------------------------------------------------------------------------------------------------
# Groups


def grouped(keys: NDArray[Any], lengths: Times, percentiles: Sequence[float]) -> list[Group]:
    """Events of equal key together, the longest total first. Percentiles are linear, as numpy's."""
    if not len(keys):
        return []
    groups = pd.Series(lengths).groupby(keys)
    table = groups.agg(["size", "sum"])
    if percentiles:
        table = table.join(groups.quantile([each / 100 for each in percentiles]).unstack())
    ranked = table.sort_values("sum", ascending=False, kind="stable")
    return [
        Group(int(key), int(count), int(total), tuple(map(float, cells)))
        for key, count, total, *cells in ranked.itertuples()
    ]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _natural(text: str) -> tuple[int, str]:
    """2 before 10."""
    return (int(text), "") if text.isdigit() else (10**9, text)
