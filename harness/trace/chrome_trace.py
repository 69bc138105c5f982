"""Reads a Chrome trace, ours or torch.profiler's, plain or gzipped; what one must hold: trace.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.common import intervals
from overlap_bench.harness.trace import chrome_events, chrome_rows, events, pairs, rows
from overlap_bench.harness.trace.chrome_rows import WAIT, Tables
from overlap_bench.harness.trace.events import (
    NONE,
    Calls,
    Coder,
    Codes,
    Ranges,
    Synchronizations,
    Times,
    Trace,
)
from overlap_bench.harness.trace.rows import Columns
from overlap_bench.harness.trace.waits import recorded

SAID_EVERY = 500_000  # events between two lines of progress
# How those who merge traces tell whose an event is, in the name or in the id of its process.
WHOSE = re.compile(r"(?i)(?<![a-z])(rank|node|host|worker|tp|dp|pp|ep)[\s_:#=-]*(\d+)")
IN_FRONT = re.compile(r"(.*?\D)\d+\s*", re.DOTALL)


def read(path: Path, progress: events.Progress) -> Trace:
    """The whole trace. Raises BadFile, one line, where it is no Chrome trace, or holds nothing that a device
    did."""
    tables, said = Tables(), 0
    try:
        for batch in chrome_events.batches(path):
            tables.add(batch)
            if tables.seen >= said + SAID_EVERY:
                said = tables.seen
                progress(f"{path.name}: {tables.seen:,} events")
        tables.close()
    except chrome_events.UNREADABLE as error:
        what = "is cut short" if "truncated" in str(error) else "is not JSON"
        raise BadFile(f"{path} {what}: {error}") from None
    if not tables.work.count:
        raise BadFile(f"{path} {_lacks(tables)}")
    return _trace(path, tables)


def _lacks(tables: Tables) -> str:
    if tables.odd and not tables.seen:
        first = f"the first: {tables.first_odd}"
        return f"is no Chrome trace: none of its {tables.odd:,} entries is an event, {first}"
    cut = "is cut short, and what there is of it " if tables.cut else ""
    *most, last = chrome_rows.WORK
    return (
        f"{cut}has no GPU rows: none of its {tables.complete:,} complete events has the category "
        f"{', '.join(most)} or {last}"
    )


def _trace(path: Path, tables: Tables) -> Trace:
    placed = _placed(tables)
    found, left_out = rows.sound(placed.tables)
    calls, work, ranges = found["calls"], found["work"], found["ranges"]
    if not len(work["start"]):
        raise BadFile(f"{path} has no GPU rows with times; {'; '.join(left_out.warnings())}")
    launched = rows.launched(calls, work, tables.names.values, placed.devices, left_out)
    work, call, process = launched.columns, launched.work.call, launched.process
    phases = Ranges(
        ranges["start"], ranges["end"], ranges["name"], ranges["thread"], np.ones(len(ranges["start"]), bool)
    )
    of_calls, unknown = recorded(launched.calls, calls, found["waits"], tables.names)
    launches, arrows = _arrows(work, placed.flows)
    begun, of_each = _once(arrows)
    call[launches] = len(calls["start"]) + of_each
    return Trace(
        file=str(path),
        format="Chrome trace" if work["ours"].any() else "Chrome trace of torch.profiler",
        ranges=phases,
        calls=launched.calls.joined(_as_calls(begun, phases)),
        work=replace(launched.work, call=call),
        copies=rows.copies(work, tables.copies.taken()),
        synchronizations=_own_waits(ranges, phases, tables.names).joined(of_calls),
        names=tuple(tables.names.values),
        devices=placed.devices,
        untold=launched.untold,
        warnings=(
            *_of_file(tables),
            *left_out.warnings(),
            *_shared(placed, work["device"], process),
            *launched.warnings,
            *unknown,
        ),
    )


def _of_file(tables: Tables) -> Iterator[str]:
    if tables.cut:
        yield "the file is cut short: it was read as far as it goes, and may have gone on; copy it again"
    if tables.odd:
        entries = "entry that is" if tables.odd == 1 else "entries that are"
        yield f"left out: {tables.odd:,} {entries} no event, the first: {tables.first_odd}"


# ---------------------------------------------------------------------------------------------------------
# Whose each track and device is


@dataclass(frozen=True, slots=True)
class _Placed:
    """The tables with threads, processes and devices that are equal where the thing is the same one.
    `devices`: names by code. `twice`: what several of them are called in the file."""

    tables: dict[str, Columns]
    flows: Columns
    devices: tuple[str, ...]
    twice: tuple[str, ...]


def _placed(tables: Tables) -> _Placed:
    found = {name: getattr(tables, name).taken() for name in ("work", "calls", "waits", "ranges", "flows")}
    found["work"]["copy"] = rows.numbered(found["work"]["kind"] == events.COPY)
    tracks = tables.tracks.values
    joined = {name: np.unique(found[name]["track"]).tolist() for name in ("calls", "work", "waits")}
    used = {*joined["calls"], *joined["work"], *joined["waits"]}
    ranked = all(tracks[each][2] is not None for each in used)

    def key(pid: object, last: object, rank: object) -> tuple[str, str, str]:
        return str(pid), str(last), str(rank) if ranked else ""

    threads, processes = Coder(), Coder()
    thread = np.array([threads.code(key(*each)) for each in tracks], np.int32)
    whose = _whose(tables, [key(*each) for each in tracks], joined)
    process = np.array(
        [
            processes.code(whose[code] if whose else key(pid, "", rank))
            for code, (pid, _, rank) in enumerate(tracks)
        ],
        np.int32,
    )
    devices = Coder()
    device = np.array(
        [devices.code(key(pid, own, rank)) for pid, rank, own in tables.devices.values], np.int32
    )
    found["work"]["device"] = device[found["work"]["device"]]
    for name, each in found.items():
        of_track = each.pop("track")
        each["thread"] = thread[of_track]
        if name in ("work", "calls", "waits"):
            told = name == "calls" or whose is not None
            each["process"] = process[of_track] if told else np.full(len(of_track), NONE, np.int32)
    flows = found.pop("flows")
    return _Placed(found, flows, *_device_names(devices.values, tables.processes))


def _device_names(
    devices: Sequence[tuple[str, str, str]], processes: Mapping[int | str, set[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What each is called, and what several are: "0", or "0 (rank 1)" where there are two of that name."""
    counts = Counter(own for _, own, _ in devices)
    names = []
    for pid, own, rank in devices:
        said = {str(each): names for each, names in processes.items()}.get(pid, set())
        of = f"rank {rank}" if rank else " ".join(sorted(said)) or pid
        names.append(own if counts[own] == 1 else f"{own} ({of})")
    while len(set(names)) < len(names):
        names = [f"{name} #{place}" for place, name in enumerate(names)]
    return tuple(names), tuple(own for own, count in counts.items() if count > 1)


def _whose(
    tables: Tables, tracks: Sequence[tuple[str, str, str]], joined: Mapping[str, Sequence[int]]
) -> list[str] | None:
    """Whose each track is, where the file says so of every call and of all work: by rank, by a name like
    "rank 1" of the process, or by what stands in front of its number, as in "[TP1] 0"."""
    said = {str(pid): " ".join(sorted(names)) for pid, names in tables.processes.items()}
    for way in (
        [rank for _, _, rank in tracks],
        [_marks(f"{pid} {said.get(pid, '')}") for pid, _, _ in tracks],
        [found[1] if (found := IN_FRONT.fullmatch(pid)) else "" for pid, _, _ in tracks],
    ):
        callers = {way[each] for each in joined["calls"]}
        workers = {way[each] for name in ("work", "waits") for each in joined[name]}
        if len(callers) > 1 and "" not in callers and workers <= callers:
            return way
    return None


def _marks(text: str) -> str:
    """What a text says of whose it is, as "node 0, rank 1"; nothing where it is of two ranks."""
    found = {(kind.lower(), int(number)) for kind, number in WHOSE.findall(text)}
    alone = len({kind for kind, _ in found}) == len(found)
    return ", ".join(f"{kind} {number}" for kind, number in sorted(found)) if alone else ""


def _shared(placed: _Placed, device: Codes, process: Codes) -> Iterator[str]:
    for name in placed.twice:
        yield f"several processes have a device {name}; each is taken for a GPU of its own"
    for code, name in enumerate(placed.devices):
        here = process[device == code]
        if len(np.unique(here[here != NONE])) > 1:
            yield (
                f"several processes use a device {name}, and the trace does not tell whether it is one GPU; "
                "it is taken for one"
            )


# ---------------------------------------------------------------------------------------------------------
# Waits and arrows


def _own_waits(ranges: Columns, phases: Ranges, names: Coder) -> Synchronizations:
    """Phases that wait: what for is in their name."""
    own = np.flatnonzero(ranges["waits"])
    kinds = [names.code(name.removeprefix(WAIT)) for name in list(names.values)]
    return Synchronizations(
        start=phases.start[own],
        end=phases.end[own],
        kind=np.array(kinds, np.int32)[phases.name[own]],
        blocks=np.ones(len(own), bool),
        called=phases.start[own],
        thread=phases.thread[own],
        own=own,
    )


def _arrows(work: Columns, flows: Columns) -> tuple[Times, Calls]:
    """The rows of device work of ours that arrows end on, and where those begin."""
    at, thread, begin = flows["start"], flows["thread"], np.full(len(flows["start"]), NONE, np.int64)
    if work["ours"].any():  # torch.profiler has arrows too, and none that is needed
        begin = pairs.of_flows(flows["key"], flows["starts"])
    found_rows, found_begins = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for each in np.unique(work["thread"][work["ours"]]):
        here = np.flatnonzero(work["ours"] & (work["thread"] == each))
        here = here[np.argsort(work["start"][here], kind="stable")]
        ends = np.flatnonzero((begin != NONE) & (thread == each))
        place = np.searchsorted(work["start"][here], at[ends], side="right") - 1
        on_work = (place >= 0) & (at[ends] <= work["end"][here[place]])
        found_rows.append(here[place[on_work]])
        found_begins.append(begin[ends[on_work]])
    chosen = np.concatenate(found_begins)
    return np.concatenate(found_rows), Calls(at[chosen], at[chosen], thread[chosen], flows["name"][chosen])


def _once(arrows: Calls) -> tuple[Calls, Times]:
    """The arrows that begin elsewhere or are named otherwise, and for each arrow which of them it is: the six
    copies of a phase come from one call, as long as the phase."""
    rows = np.column_stack([arrows.thread, arrows.start, arrows.name])
    _, first, of_each = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    once = Calls(arrows.start[first], arrows.end[first], arrows.thread[first], arrows.name[first])
    return once, of_each.reshape(-1)


def _as_calls(arrows: Calls, phases: Ranges) -> Calls:
    """A call for each of these arrows: from its start to the end of the innermost range around it, for
    the thread is at the launch until then; of length 0 where no range is."""
    ends = arrows.start.copy()
    for thread in np.unique(arrows.thread):
        own, own_phases = np.flatnonzero(arrows.thread == thread), np.flatnonzero(phases.thread == thread)
        around = intervals.innermost(phases.start[own_phases], phases.end[own_phases], arrows.start[own])
        ends[own] = np.where(
            around == NONE, arrows.start[own], events.take(phases.end[own_phases], around, NONE)
        )
    return Calls(arrows.start, ends, arrows.thread, arrows.name)
