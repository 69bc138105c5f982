"""Reads a Chrome trace, ours or torch.profiler's, plain or gzipped; what one must hold: trace.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from engines.api import BadFile
from harness.common import intervals
from harness.trace import chrome_events, events
from harness.trace.chrome_events import Event
from harness.trace.events import NONE, Calls, Coder, Copies, Ranges, Synchronizations, Trace, Work

RANGES = ("phase", "cpu_op", "user_annotation")
CALLS = ("cuda_runtime", "cuda_driver")
WORK = {
    "kernel": events.KERNEL,
    "gpu_memcpy": events.COPY,
    "gpu_memset": events.MEMSET,
    "device": events.PROGRAM,
}
FLOWS = "flows"
CATEGORIES = {
    **dict.fromkeys(WORK, "work"),
    **dict.fromkeys(RANGES, "ranges"),
    **dict.fromkeys(CALLS, "called"),
    "cuda_sync": "waits",
}
SAID_EVERY = 500_000  # events between two lines of progress
WAIT = "wait."  # in front of the name of a phase that waits
DIRECTIONS = {"h2d": "HtoD", "d2h": "DtoH"}
SYNCHRONIZATIONS = {"Event Sync": events.EVENT, "Stream Wait Event": events.STREAM_WAITS,
                    "Stream Sync": events.STREAM, "Context Sync": events.CONTEXT}  # fmt: skip

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

Progress = Callable[[str], None]


class Args(msgspec.Struct, gc=False):
    """What is read of an event's own arguments."""

    correlation: Whole = NONE
    device: int | str | None = None
    stream: int | str | None = None
    bytes: Whole = NONE
    memory: str = "unknown"


read_args = msgspec.json.Decoder(Args).decode


def read(path: Path, progress: Progress) -> Trace:
    """The whole trace. Raises BadFile, one line, where it is cut short, is no Chrome trace, or holds
    nothing that a device did."""
    columns, count, said = _Columns(path), 0, 0
    try:
        for found in chrome_events.batches(path):
            columns.add(found)
            count += len(found)
            if count >= said + SAID_EVERY:
                said = count
                progress(f"{path.name}: {count:,} events")
        return columns.trace()
    except msgspec.ValidationError as error:
        raise BadFile(f"{path} is JSON, but not a Chrome trace: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "is cut short" if "truncated" in str(error) else "is not JSON"
        raise BadFile(f"{path} {what}: {error}") from None


class _Rows:
    """Columns that grow by some rows at a time; each is taken once, as one array."""

    def __init__(self, **kinds: type) -> None:
        self._kinds = kinds
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in kinds}
        self.count = 0

    def add(self, count: int, **columns: Iterable[Any]) -> None:
        for name, values in columns.items():
            self._parts[name].append(np.fromiter(values, self._kinds[name], count))
        self.count += count

    def take(self, name: str) -> NDArray[Any]:
        return np.concatenate([np.empty(0, self._kinds[name]), *self._parts.pop(name)])


Times, Code, Id, Flag = np.float64, np.int32, np.int64, np.bool_  # us as the file has them


class _Columns:
    """The events of one file on their way into arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complete = 0
        # us; times count from here, for an epoch's digits would leave none for nanoseconds
        self.base = np.inf
        self.names, self.tracks, self.devices = Coder(), Coder(), Coder()
        times = {"start": Times, "end": Times}
        self.flows = _Rows(at=Times, track=Code, name=Code, key=Id, starts=Flag)
        self.work = _Rows(**times, track=Code, name=Code, kind=Code, device=Code, correlation=Id, ours=Flag)
        self.copies = _Rows(**times, direction=Code, memory=Code, bytes=Id)
        self.ranges = _Rows(**times, track=Code, name=Code, waits=Flag, kind=Code)
        self.called = _Rows(**times, track=Code, name=Code, correlation=Id)
        self.waits = _Rows(**times, kind=Code, blocks=Flag, correlation=Id)

    def add(self, found: Sequence[Event]) -> None:
        """Take in the next events of the file."""
        chosen: dict[str, list[Event]] = {name: [] for name in (*set(CATEGORIES.values()), FLOWS)}
        for each in found:
            if each.ph == "X":
                self.complete += 1
                if each.ts < self.base:
                    self.base = each.ts
                kind = CATEGORIES.get(each.cat)
                if kind is not None:
                    chosen[kind].append(each)
            elif each.ph in ("s", "f"):
                chosen[FLOWS].append(each)
        self._add_flows(chosen[FLOWS])
        self._add_work(chosen["work"])
        self._add_ranges(chosen["ranges"])
        self._add_calls(chosen["called"])
        self._add_waits(chosen["waits"])

    def trace(self) -> Trace:
        """What the file said, once all of it is taken in. Raises BadFile where no device did anything."""
        if not self.work.count:
            raise BadFile(
                f"{self.path} has no GPU rows: none of its {self.complete:,} complete events has the "
                f"category {', '.join(list(WORK)[:-1])} or {list(WORK)[-1]}"
            )
        phases = Ranges(
            *self._times(self.ranges),
            self.ranges.take("name"),
            self.ranges.take("track"),
            np.ones(self.ranges.count, bool),
        )
        correlation = self.called.take("correlation")
        known = Calls(*self._times(self.called), self.called.take("track"), self.called.take("name"))
        synchronizations = self._synchronizations(known, correlation, phases)
        ours = self.work.take("ours")
        work, arrows = self._work(correlation, ours)
        return Trace(
            file=str(self.path),
            format="Chrome trace" if ours.any() else "Chrome trace of torch.profiler",
            ranges=phases,
            calls=known.joined(_as_calls(arrows, phases)),
            work=work,
            copies=Copies(
                *self._times(self.copies),
                self.copies.take("direction"),
                self.copies.take("memory"),
                self.copies.take("bytes"),
            ),
            synchronizations=synchronizations,
            names=tuple(self.names.values),
            devices=tuple(str(each) for each in self.devices.values),
            warnings=(),
        )

    # -----------------------------------------------------------------------------------------------------
    # Events into rows

    def _placed(self, chosen: Sequence[Event]) -> dict[str, Iterable[Any]]:
        """Times, track and name."""
        return {**_timed(chosen), "track": self._tracks(chosen), "name": self._named(chosen)}

    def _named(self, chosen: Sequence[Event]) -> Iterable[int]:
        return (self.names.code(each.name or "") for each in chosen)

    def _tracks(self, chosen: Sequence[Event]) -> Iterable[int]:
        return (self.tracks.code(each.track) for each in chosen)

    def _add_flows(self, chosen: Sequence[Event]) -> None:
        self.flows.add(
            len(chosen),
            at=(each.ts for each in chosen),
            track=self._tracks(chosen),
            name=self._named(chosen),
            key=(hash((each.cat, each.name, each.id)) for each in chosen),
            starts=(each.ph == "s" for each in chosen),
        )

    def _add_work(self, chosen: Sequence[Event]) -> None:
        args = [read_args(each.args) for each in chosen]
        directions = [_direction(each) for each in chosen]
        places = (
            each.pid if own.device is None else own.device for each, own in zip(chosen, args, strict=True)
        )
        kinds = (
            events.COPY if found else WORK[each.cat] for each, found in zip(chosen, directions, strict=True)
        )
        self.work.add(
            len(chosen),
            **self._placed(chosen),
            kind=kinds,
            device=(self.devices.code(each) for each in places),
            correlation=(each.correlation for each in args),
            ours=(each.cat == "device" for each in chosen),
        )
        copies = [
            (each, own, found) for each, own, found in zip(chosen, args, directions, strict=True) if found
        ]
        memories = (
            _memory(each.name or "", found) if each.cat == "gpu_memcpy" else own.memory
            for each, own, found in copies
        )
        self.copies.add(
            len(copies),
            **_timed([each for each, _, _ in copies]),
            direction=(self.names.code(found) for _, _, found in copies),
            memory=(self.names.code(each) for each in memories),
            bytes=(own.bytes for _, own, _ in copies),
        )

    def _add_ranges(self, chosen: Sequence[Event]) -> None:
        waits = [each.cat == "phase" and (each.name or "").startswith(WAIT) for each in chosen]
        self.ranges.add(
            len(chosen),
            **self._placed(chosen),
            waits=waits,
            kind=(
                self.names.code((each.name or "").removeprefix(WAIT)) if wait else NONE
                for each, wait in zip(chosen, waits, strict=True)
            ),
        )

    def _add_calls(self, chosen: Sequence[Event]) -> None:
        correlations = (read_args(each.args).correlation for each in chosen)
        self.called.add(len(chosen), **self._placed(chosen), correlation=correlations)

    def _add_waits(self, chosen: Sequence[Event]) -> None:
        kinds = [SYNCHRONIZATIONS.get(each.name or "", each.name or "unknown") for each in chosen]
        self.waits.add(
            len(chosen),
            **_timed(chosen),
            kind=(self.names.code(each) for each in kinds),
            blocks=(each != events.STREAM_WAITS for each in kinds),
            correlation=(read_args(each.args).correlation for each in chosen),
        )

    # -----------------------------------------------------------------------------------------------------
    # Rows into tables

    def _ns(self, times: NDArray[np.float64]) -> events.Times:
        """us of the file as ns."""
        times -= self.base
        times *= 1e3
        return np.rint(times, out=times).astype(np.int64)

    def _times(self, rows: _Rows) -> tuple[events.Times, events.Times]:
        return self._ns(rows.take("start")), self._ns(rows.take("end"))

    def _work(self, correlation: events.Times, ours: events.Flags) -> tuple[Work, Calls]:
        """What devices did, and the launches among it that arrows tell of; these come after all calls."""
        start, end = self._times(self.work)
        track = self.work.take("track")
        call = _called_by(self.work.take("correlation"), correlation)
        rows, arrows = self._launches(start, end, track, ours)
        call[rows] = len(correlation) + np.arange(len(rows))
        columns = {name: self.work.take(name) for name in ("device", "kind", "name")}
        return Work(start=start, end=end, stream=track, call=call, **columns), arrows

    def _launches(
        self, start: events.Times, end: events.Times, track: events.Codes, ours: events.Flags
    ) -> tuple[events.Times, Calls]:
        """The rows of device work without a correlation id that arrows end on, and where those begin."""
        at, key, starts = self._ns(self.flows.take("at")), self.flows.take("key"), self.flows.take("starts")
        tracks, names = self.flows.take("track"), self.flows.take("name")
        begins = np.flatnonzero(starts)[::-1]  # of several the last
        found_rows, found_begins = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for each in np.unique(track[ours]):
            rows = np.flatnonzero(ours & (track == each))
            rows = rows[np.argsort(start[rows], kind="stable")]
            ends = np.flatnonzero(~starts & (tracks == each))
            begin = events.take(begins, events.match(key[ends], key[begins]), NONE)
            place = np.searchsorted(start[rows], at[ends], side="right") - 1
            on_work = (place >= 0) & (begin != NONE) & (at[ends] <= end[rows[place]])
            found_rows.append(rows[place[on_work]])
            found_begins.append(begin[on_work])
        chosen = np.concatenate(found_begins)
        return np.concatenate(found_rows), Calls(at[chosen], at[chosen], tracks[chosen], names[chosen])

    def _synchronizations(self, calls: Calls, correlation: events.Times, phases: Ranges) -> Synchronizations:
        own = np.flatnonzero(self.ranges.take("waits"))
        own_waits = Synchronizations(
            start=phases.start[own],
            end=phases.end[own],
            kind=self.ranges.take("kind")[own],
            blocks=np.ones(len(own), bool),
            called=phases.start[own],
            thread=phases.thread[own],
            own=own,
        )
        return own_waits.joined(self._of_calls(calls, correlation))

    def _of_calls(self, calls: Calls, correlation: events.Times) -> Synchronizations:
        if not self.waits.count:
            return events.synchronizing(calls, self.names)
        start, end = self._times(self.waits)
        call = _called_by(self.waits.take("correlation"), correlation)
        return Synchronizations(
            start=start,
            end=end,
            kind=self.waits.take("kind"),
            blocks=self.waits.take("blocks"),
            called=np.where(call == NONE, start, events.take(calls.start, call, NONE)),
            thread=events.take(calls.thread, call, NONE),
            own=np.full(len(start), NONE, np.int64),
        )


def _timed(chosen: Sequence[Event]) -> dict[str, Iterable[Any]]:
    return {"start": (each.ts for each in chosen), "end": (each.ts + each.dur for each in chosen)}


def _called_by(wanted: events.Times, known: events.Times) -> events.Times:
    """The call that each of them came from, by its correlation id; NONE without one."""
    return np.where(wanted == NONE, NONE, events.match(wanted, known))


def _as_calls(arrows: Calls, phases: Ranges) -> Calls:
    """A call for each arrow: from its start to the end of the innermost range around that start, for the
    thread is at the launch until then; of length 0 where no range is."""
    ends = arrows.start.copy()
    for thread in np.unique(arrows.thread):
        own, rows = np.flatnonzero(arrows.thread == thread), np.flatnonzero(phases.thread == thread)
        around = intervals.innermost(phases.start[rows], phases.end[rows], arrows.start[own])
        ends[own] = np.where(around == NONE, arrows.start[own], events.take(phases.end[rows], around, NONE))
    return Calls(arrows.start, ends, arrows.thread, arrows.name)


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
