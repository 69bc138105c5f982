"""Reads a Chrome trace, ours or torch.profiler's, plain or gzipped; what one must hold: trace.md."""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from engines.api import BadFile
from harness.common import intervals
from harness.trace import events
from harness.trace.events import NONE, Calls, Coder, Copies, Ranges, Synchronizations, Trace, Work

GZIP = b"\x1f\x8b"
RANGES = ("phase", "cpu_op", "user_annotation")
CALLS = ("cuda_runtime", "cuda_driver")
WORK = {
    "kernel": events.KERNEL,
    "gpu_memcpy": events.COPY,
    "gpu_memset": events.MEMSET,
    "device": events.PROGRAM,
}
WAIT = "wait."  # in front of the name of a phase that waits
DIRECTIONS = {"h2d": "HtoD", "d2h": "DtoH"}
SYNCHRONIZATIONS = {"Event Sync": events.EVENT, "Stream Wait Event": events.STREAM_WAITS,
                    "Stream Sync": events.STREAM, "Context Sync": events.CONTEXT}  # fmt: skip

FARTHEST_US = 2.5e15  # of a time from 0, in the year 2049; sums of three still fit into 64 bits as ns
Us = Annotated[float, Meta(ge=-FARTHEST_US, le=FARTHEST_US)]
Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

Progress = Callable[[str], None]


class Args(msgspec.Struct):
    """What is read of an event's own arguments."""

    correlation: Whole = NONE
    device: int | str | None = None
    stream: int | str | None = None
    bytes: Whole = NONE
    memory: str = "unknown"


class Event(msgspec.Struct):
    """One event. `args` stays text until somebody asks: for most, nobody does."""

    ph: str = ""
    name: str | None = ""
    cat: str = ""
    ts: Us = 0.0
    dur: Us = 0.0
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")

    def read_args(self) -> Args:
        return msgspec.json.decode(self.args, type=Args)

    @property
    def track(self) -> tuple[int | str, int | str]:
        return self.pid, self.tid


class Document(msgspec.Struct, rename="camel"):
    """The form that is an object."""

    trace_events: list[Event]


def read(path: Path, progress: Progress) -> Trace:
    """The whole trace. Raises BadFile, one line, where it is cut short, is no Chrome trace, or holds
    nothing that a device did."""
    content = _text(path)
    progress(f"{path.name}: {len(content):,} bytes of JSON")
    try:
        if content.lstrip()[:1] == b"[":
            found = msgspec.json.decode(content, type=list[Event])
        else:
            found = msgspec.json.decode(content, type=Document).trace_events
        progress(f"{path.name}: {len(found):,} events")
        return _Columns(path, found).trace()
    except msgspec.ValidationError as error:
        raise BadFile(f"{path} is JSON, but not a Chrome trace: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        what = "is cut short" if "truncated" in str(error) else "is not JSON"
        raise BadFile(f"{path} {what}: {error}") from None


def _text(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except EOFError:
        raise BadFile(f"{path} is cut short: the compressed data ends too early") from None
    except (OSError, zlib.error) as error:
        raise BadFile(f"cannot read {path}, its compressed data is damaged: {error}") from None


class _Columns:
    """The events of one file on their way into arrays."""

    def __init__(self, path: Path, found: Sequence[Event]) -> None:
        complete = [each for each in found if each.ph == "X"]
        self.path = path
        self.flows = [each for each in found if each.ph in "sf"]
        self.work = [each for each in complete if each.cat in WORK]
        self.ranges = [each for each in complete if each.cat in RANGES]
        self.called = [each for each in complete if each.cat in CALLS]
        self.waits = [each for each in complete if each.cat == "cuda_sync"]
        if not self.work:
            raise BadFile(
                f"{path} has no GPU rows: none of its {len(complete):,} complete events has the category "
                f"{', '.join(list(WORK)[:-1])} or {list(WORK)[-1]}"
            )
        # us; times count from here, for an epoch's digits would leave none for nanoseconds
        self.base = min(each.ts for each in complete)
        self.names, self.threads, self.devices = Coder(), Coder(), Coder()

    def trace(self) -> Trace:
        arrows = self._launches()
        phases = self._ranges()
        calls = self._calls(arrows, phases)
        ours = any(each.cat == "device" for each in self.work)
        return Trace(
            file=str(self.path),
            format="Chrome trace" if ours else "Chrome trace of torch.profiler",
            ranges=phases,
            calls=calls,
            work=self._work(arrows),
            copies=self._copies(),
            synchronizations=self._synchronizations(calls, phases),
            names=tuple(self.names.values),
            devices=tuple(str(each) for each in self.devices.values),
            warnings=(),
        )

    # -----------------------------------------------------------------------------------------------------
    # Cells

    def _times(self, times: Iterable[float]) -> events.Times:
        """us of the file as ns."""
        counted = np.fromiter((each - self.base for each in times), np.float64)
        return np.rint(counted * 1e3).astype(np.int64)

    def _starts(self, chosen: Sequence[Event]) -> events.Times:
        return self._times(each.ts for each in chosen)

    def _ends(self, chosen: Sequence[Event]) -> events.Times:
        return self._times(each.ts + each.dur for each in chosen)

    def _codes(self, coder: Coder, values: Iterable[Any]) -> events.Codes:
        return np.fromiter((coder.code(each) for each in values), np.int32)

    def _named(self, chosen: Sequence[Event]) -> events.Codes:
        return self._codes(self.names, (each.name or "" for each in chosen))

    def _tracks(self, chosen: Sequence[Event]) -> events.Codes:
        return self._codes(self.threads, (each.track for each in chosen))

    def _called_by(self, args: Iterable[Args]) -> events.Times:
        """The call that each of them came from, by its correlation id; NONE without one."""
        wanted = np.fromiter((each.correlation for each in args), np.int64)
        known = np.fromiter((each.read_args().correlation for each in self.called), np.int64)
        return np.where(wanted == NONE, NONE, events.match(wanted, known))

    # -----------------------------------------------------------------------------------------------------
    # Tables

    def _ranges(self) -> Ranges:
        nests = np.ones(len(self.ranges), bool)
        times = self._starts(self.ranges), self._ends(self.ranges)
        return Ranges(*times, self._named(self.ranges), self._tracks(self.ranges), nests)

    def _calls(self, arrows: Sequence[tuple[Event, int]], phases: Ranges) -> Calls:
        """API calls, then a call for each arrow: from its start to the end of the innermost range around that
        start, for the thread is at the launch until then; of length 0 where no range is."""
        launches = [start for start, _ in arrows]
        starts = self._starts(launches)
        threads = self._tracks(launches)
        ends = starts.copy()
        for thread in np.unique(threads):
            own, rows = np.flatnonzero(threads == thread), np.flatnonzero(phases.thread == thread)
            around = intervals.innermost(phases.start[rows], phases.end[rows], starts[own])
            ends[own] = np.where(around == NONE, starts[own], events.take(phases.end[rows], around, NONE))
        known = Calls(self._starts(self.called), self._ends(self.called), self._tracks(self.called))
        return known.joined(Calls(starts, ends, threads))

    def _launches(self) -> list[tuple[Event, int]]:
        """The start of each arrow that ends on device work without a correlation id, and the row of that."""
        starts = {(each.cat, each.name, each.id): each for each in self.flows if each.ph == "s"}
        rows: dict[tuple[Any, Any], list[int]] = defaultdict(list)
        for row, each in enumerate(self.work):
            if each.cat == "device":
                rows[each.track].append(row)
        arrows = []
        ends = [each for each in self.flows if each.ph == "f" and each.track in rows]
        for track in {each.track for each in ends}:
            here = [each for each in ends if each.track == track]
            order = np.array(sorted(rows[track], key=lambda row: self.work[row].ts))
            begin, end = (times([self.work[row] for row in order]) for times in (self._starts, self._ends))
            at = self._starts(here)
            places = np.searchsorted(begin, at, side="right") - 1
            for each, place, time in zip(here, places.tolist(), at.tolist(), strict=True):
                start = starts.get((each.cat, each.name, each.id))
                if start is not None and place >= 0 and time <= end[place]:
                    arrows.append((start, int(order[place])))
        return arrows

    def _work(self, arrows: Sequence[tuple[Event, int]]) -> Work:
        work = self.work
        args = [each.read_args() for each in work]
        call = self._called_by(args)
        for number, (_, row) in enumerate(arrows):
            call[row] = len(self.called) + number
        places = [
            each.pid if own.device is None else own.device for each, own in zip(work, args, strict=True)
        ]
        kinds = [events.COPY if _direction(each) else WORK[each.cat] for each in work]
        return Work(
            start=self._starts(work),
            end=self._ends(work),
            device=self._codes(self.devices, places),
            stream=self._codes(Coder(), (each.track for each in work)),
            kind=np.array(kinds, np.int32),
            name=self._named(work),
            call=call,
        )

    def _copies(self) -> Copies:
        copies = [(each, found) for each in self.work if (found := _direction(each))]
        args = [each.read_args() for each, _ in copies]
        memories = [
            _memory(each.name or "", found) if each.cat == "gpu_memcpy" else own.memory
            for (each, found), own in zip(copies, args, strict=True)
        ]
        chosen = [each for each, _ in copies]
        return Copies(
            self._starts(chosen),
            self._ends(chosen),
            self._codes(self.names, (found for _, found in copies)),
            self._codes(self.names, memories),
            np.fromiter((each.bytes for each in args), np.int64),
        )

    def _synchronizations(self, calls: Calls, phases: Ranges) -> Synchronizations:
        names = [each.name or "" for each in self.ranges]
        waits = [
            row for row, each in enumerate(self.ranges) if each.cat == "phase" and names[row].startswith(WAIT)
        ]
        own = np.array(waits, np.int64)
        of_calls = self._of_calls(calls)
        own_waits = Synchronizations(
            start=phases.start[own],
            end=phases.end[own],
            kind=self._codes(self.names, (names[row].removeprefix(WAIT) for row in waits)),
            blocks=np.ones(len(own), bool),
            called=phases.start[own],
            thread=phases.thread[own],
            own=own,
        )
        return own_waits.joined(of_calls)

    def _of_calls(self, calls: Calls) -> Synchronizations:
        if not self.waits:
            count = len(self.called)  # behind them are arrows, which wait for nothing
            own_calls = Calls(calls.start[:count], calls.end[:count], calls.thread[:count])
            return events.synchronizing(own_calls, self._named(self.called), self.names)
        kinds = [SYNCHRONIZATIONS.get(each.name or "", each.name or "unknown") for each in self.waits]
        starts, call = self._starts(self.waits), self._called_by(each.read_args() for each in self.waits)
        return Synchronizations(
            start=starts,
            end=self._ends(self.waits),
            kind=self._codes(self.names, kinds),
            blocks=np.array([kind != events.STREAM_WAITS for kind in kinds], bool),
            called=np.where(call == NONE, starts, events.take(calls.start, call, NONE)),
            thread=events.take(calls.thread, call, NONE),
            own=np.full(len(self.waits), NONE, np.int64),
        )


def _direction(event: Event) -> str:
    """Of a copy, "HtoD"; nothing for other work. torch.profiler says it in a name like "Memcpy HtoD
    (Pageable -> Device)"."""
    name = event.name or ""
    if event.cat == "gpu_memcpy":
        return next(iter(name.split()[1:2]), "unknown")
    return DIRECTIONS.get(name.partition(".")[0], "") if event.cat == "device" else ""


def _memory(name: str, direction: str) -> str:
    """The host's side of "Memcpy HtoD (Pageable -> Device)": "pageable"."""
    source, _, target = name.partition("(")[2].rstrip(")").partition(" -> ")
    side = target if direction == "DtoH" else source
    return side.strip().lower() or "unknown"
