"""Reads a Chrome trace, ours or torch.profiler's, plain or gzipped; what one must hold: trace.md."""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

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

Progress = Callable[[str], None]


class Args(msgspec.Struct):
    """What is read of an event's own arguments."""

    correlation: int = NONE
    device: int | str | None = None
    stream: int | str | None = None
    bytes: int = NONE
    memory: str = "unknown"


class Event(msgspec.Struct):
    """One event. `args` stays text until somebody asks: for most, nobody does."""

    ph: str = ""
    name: str | None = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
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
        return _Columns(found).trace(path)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path} is JSON, but not a Chrome trace: {error}") from None
    except msgspec.DecodeError as error:
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


@dataclass(slots=True)
class _Columns:
    """The events of one file on their way into arrays."""

    found: list[Event]
    names: Coder = field(default_factory=Coder)
    threads: Coder = field(default_factory=Coder)
    base: float = 0.0  # us; times count from here, for an epoch's digits would leave none for nanoseconds

    def trace(self, path: Path) -> Trace:
        complete = [each for each in self.found if each.ph == "X"]
        flows = [each for each in self.found if each.ph in "sf"]
        self.base = min((each.ts for each in complete), default=0.0)
        work = [each for each in complete if each.cat in WORK]
        if not work:
            raise BadFile(
                f"{path} has no GPU rows: none of its {len(complete):,} complete events has the category "
                f"{', '.join(list(WORK)[:-1])} or {list(WORK)[-1]}"
            )
        ranges = [each for each in complete if each.cat in RANGES]
        called = [each for each in complete if each.cat in CALLS]
        arrows = self._launches(flows, work)
        phases = self._ranges(ranges)
        calls = self._calls(called, arrows, phases)
        devices = Coder()
        columns = self._work(work, calls, called, arrows, devices)
        waits = [each for each in complete if each.cat == "cuda_sync"]
        ours = any(each.cat == "device" for each in work)
        return Trace(
            file=str(path),
            format="Chrome trace" if ours else "Chrome trace of torch.profiler",
            ranges=phases,
            calls=calls,
            work=columns,
            copies=self._copies(work),
            synchronizations=self._synchronizations(waits, called, calls, ranges, phases),
            names=tuple(self.names.values),
            devices=tuple(str(each) for each in devices.values),
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

    # -----------------------------------------------------------------------------------------------------
    # Tables

    def _ranges(self, chosen: Sequence[Event]) -> Ranges:
        return Ranges(
            self._starts(chosen),
            self._ends(chosen),
            self._codes(self.names, (each.name or "" for each in chosen)),
            self._codes(self.threads, (each.track for each in chosen)),
            np.ones(len(chosen), bool),
        )

    def _calls(self, called: Sequence[Event], arrows: Sequence[tuple[Event, int]], phases: Ranges) -> Calls:
        """API calls, then a call for each arrow: from its start to the end of the innermost range around that
        start, for the thread is at the launch until then; of length 0 where no range is."""
        launches = [start for start, _ in arrows]
        starts = self._starts(launches)
        threads = self._codes(self.threads, (each.track for each in launches))
        ends = starts.copy()
        for thread in np.unique(threads):
            own, rows = np.flatnonzero(threads == thread), np.flatnonzero(phases.thread == thread)
            around = intervals.innermost(phases.start[rows], phases.end[rows], starts[own])
            ends[own] = np.where(around == NONE, starts[own], events.take(phases.end[rows], around, NONE))
        return Calls(
            np.concatenate((self._starts(called), starts)),
            np.concatenate((self._ends(called), ends)),
            np.concatenate((self._codes(self.threads, (each.track for each in called)), threads)),
        )

    def _launches(self, flows: Sequence[Event], work: Sequence[Event]) -> list[tuple[Event, int]]:
        """The start of each arrow that ends on device work without a correlation id, and the row of that."""
        starts = {(each.cat, each.name, each.id): each for each in flows if each.ph == "s"}
        rows: dict[tuple[Any, Any], list[int]] = defaultdict(list)
        for row, each in enumerate(work):
            if each.cat == "device":
                rows[each.track].append(row)
        arrows = []
        ends = [each for each in flows if each.ph == "f" and each.track in rows]
        for track in {each.track for each in ends}:
            here = [each for each in ends if each.track == track]
            order = np.array(sorted(rows[track], key=lambda row: work[row].ts))
            begin, end = (times([work[row] for row in order]) for times in (self._starts, self._ends))
            at = self._starts(here)
            places = np.searchsorted(begin, at, side="right") - 1
            for each, place, time in zip(here, places.tolist(), at.tolist(), strict=True):
                start = starts.get((each.cat, each.name, each.id))
                if start is not None and place >= 0 and time <= end[place]:
                    arrows.append((start, int(order[place])))
        return arrows

    def _work(
        self,
        work: Sequence[Event],
        calls: Calls,
        called: Sequence[Event],
        arrows: Sequence[tuple[Event, int]],
        devices: Coder,
    ) -> Work:
        args = [each.read_args() for each in work]
        correlations = np.fromiter((each.correlation for each in args), np.int64)
        known = np.fromiter((each.read_args().correlation for each in called), np.int64)
        call = np.where(correlations == NONE, NONE, events.match(correlations, known))
        for number, (_, row) in enumerate(arrows):
            call[row] = len(called) + number
        places = [
            each.pid if own.device is None else own.device for each, own in zip(work, args, strict=True)
        ]
        kinds = [events.COPY if _direction(each) else WORK[each.cat] for each in work]
        return Work(
            start=self._starts(work),
            end=self._ends(work),
            device=self._codes(devices, places),
            stream=self._codes(Coder(), (each.track for each in work)),
            kind=np.array(kinds, np.int32),
            name=self._codes(self.names, (each.name or "" for each in work)),
            call=call,
        )

    def _copies(self, work: Sequence[Event]) -> Copies:
        copies = [(each, found) for each in work if (found := _direction(each))]
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

    def _synchronizations(
        self,
        waits: Sequence[Event],
        called: Sequence[Event],
        calls: Calls,
        ranges: Sequence[Event],
        phases: Ranges,
    ) -> Synchronizations:
        names = [each.name or "" for each in ranges]
        own = np.array(
            [row for row, name in enumerate(names) if ranges[row].cat == "phase" and name.startswith(WAIT)],
            np.int64,
        )
        of_calls = self._of_calls(waits, called, calls)
        kinds = self._codes(self.names, (names[row].removeprefix(WAIT) for row in own.tolist()))
        return Synchronizations(
            start=np.concatenate((phases.start[own], of_calls.start)),
            end=np.concatenate((phases.end[own], of_calls.end)),
            kind=np.concatenate((kinds, of_calls.kind)),
            blocks=np.concatenate((np.ones(len(own), bool), of_calls.blocks)),
            called=np.concatenate((phases.start[own], of_calls.called)),
            thread=np.concatenate((phases.thread[own], of_calls.thread)),
            own=np.concatenate((own, of_calls.own)),
        )

    def _of_calls(self, waits: Sequence[Event], called: Sequence[Event], calls: Calls) -> Synchronizations:
        if not waits:
            count = len(called)  # behind them are arrows, which wait for nothing
            own_calls = Calls(calls.start[:count], calls.end[:count], calls.thread[:count])
            call_names = self._codes(self.names, (each.name or "" for each in called))
            return events.synchronizing(own_calls, call_names, self.names)
        kinds = [SYNCHRONIZATIONS.get(each.name or "", each.name or "unknown") for each in waits]
        wanted = np.fromiter((each.read_args().correlation for each in waits), np.int64)
        known = np.fromiter((each.read_args().correlation for each in called), np.int64)
        call = np.where(wanted == NONE, NONE, events.match(wanted, known))
        return Synchronizations(
            start=self._starts(waits),
            end=self._ends(waits),
            kind=self._codes(self.names, kinds),
            blocks=np.array([kind != events.STREAM_WAITS for kind in kinds], bool),
            called=np.where(call == NONE, self._starts(waits), events.take(calls.start, call, NONE)),
            thread=events.take(calls.thread, call, NONE),
            own=np.full(len(waits), NONE, np.int64),
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
