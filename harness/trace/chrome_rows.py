"""The events of a Chrome trace as rows: of ranges, calls, a device's work, waits, and arrows between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from overlap_bench.harness.trace import events
from overlap_bench.harness.trace.chrome_events import UNREADABLE, Batch, Event, readable
from overlap_bench.harness.trace.events import NONE, Coder, Times
from overlap_bench.harness.trace.rows import Columns
from overlap_bench.harness.trace.times import FARTHEST, UNTAKEN

WORK = {
    "kernel": events.KERNEL,
    "gpu_memcpy": events.COPY,
    "gpu_memset": events.MEMSET,
    "device": events.PROGRAM,
}
TABLES = {**dict.fromkeys(WORK, "work"), **dict.fromkeys(("phase", "cpu_op", "user_annotation"), "ranges")}
# Of all makers of devices: cuda_runtime, xpu_driver, privateuse1_runtime, cuda_sync.
ENDINGS = {"_runtime": "calls", "_driver": "calls", "_sync": "waits"}
EARLIER = {"memcpy": "gpu_memcpy", "memset": "gpu_memset", "operator": "cpu_op", "runtime": "cuda_runtime"}
FLOWS = "flows"
WAIT = "wait."  # in front of the name of a phase that waits
DIRECTIONS = {"h2d": "HtoD", "d2h": "DtoH"}
SYNCHRONIZATIONS = {"Event Sync": events.EVENT, "Stream Wait Event": events.STREAM_WAITS,
                    "Stream Sync": events.STREAM, "Context Sync": events.CONTEXT}  # fmt: skip
SHOWN = 80  # bytes of an odd event
LONGEST_US = FARTHEST // 1000

Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Args(msgspec.Struct, gc=False):
    """What is read of an event's own arguments."""

    correlation: Whole = NONE
    device: int | str | None = None
    bytes: Whole = NONE
    memory: str = "unknown"


class Called(msgspec.Struct):
    """What the file calls a process."""

    name: str = ""
    labels: str = ""


ARGS = msgspec.json.Decoder(Args, strict=False)


class Rows:
    """Columns that grow by some rows at a time."""

    def __init__(self, **kinds: type) -> None:
        self._kinds = kinds
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in kinds}
        self.count = 0

    def add(self, count: int, **columns: Iterable[Any]) -> None:
        for name, values in columns.items():
            self._parts[name].append(np.fromiter(values, self._kinds[name], count))
        self.count += count

    def taken(self) -> Columns:
        """All columns, once."""
        found = {}
        for name, kind in self._kinds.items():
            found[name] = np.concatenate([np.empty(0, kind), *self._parts[name]])
            self._parts[name] = []
        return found


Code, Id, Flag = np.int32, np.int64, np.bool_


class Tables:
    """The events of one file on their way into arrays."""

    def __init__(self) -> None:
        self.complete = self.seen = 0
        self.odd = 0
        self.first_odd = ""
        self.cut = False
        self.processes: dict[int | str, set[str]] = {}  # what the file calls each
        # Tracks are (pid, tid, rank), devices (pid, rank, device).
        self.names, self.tracks, self.devices = Coder(), Coder(), Coder()
        times = {"start": Id, "end": Id}
        joined = {"track": Code, "correlation": Id}
        self.flows = Rows(start=Id, track=Code, name=Code, key=Id, starts=Flag)
        self.work = Rows(**times, **joined, name=Code, kind=Code, device=Code, ours=Flag)
        self.copies = Rows(direction=Code, memory=Code, bytes=Id)
        self.ranges = Rows(**times, track=Code, name=Code, waits=Flag)
        self.calls = Rows(**times, **joined, name=Code)
        self.waits = Rows(**times, **joined, kind=Code, blocks=Flag)
        self._halves = Rows(at=Id, track=Code, event=Id)
        self._begun: list[Event] = []
        self._known: dict[str, str | None] = {**TABLES}

    def add(self, batch: Batch) -> None:
        """Take in the next events of the file."""
        self.odd += len(batch.odd)
        if batch.odd and not self.first_odd:
            self.first_odd = " ".join(batch.odd[0][:SHOWN].decode("utf-8", "backslashreplace").split())
        self.cut |= batch.cut
        chosen: dict[str, list[Event]] = {name: [] for name in ("work", "ranges", "calls", "waits", FLOWS)}
        halves: list[Event] = []
        known = self._known
        for each in batch.events:
            if each.ph == "X":
                self.complete += 1
                table = known[each.cat] if each.cat in known else self._table(each)
                if table is not None:
                    chosen[table].append(each)
            elif each.ph in ("s", "f"):
                chosen[FLOWS].append(each)
            elif each.ph in ("B", "E"):
                halves.append(each)
            elif each.ph == "M" and each.name in ("process_name", "process_labels"):
                self._name_process(each)
        self.seen += len(batch.events)
        self._add_halves(halves)
        self._add_flows(chosen[FLOWS])
        self._add_work(chosen["work"])
        self._add_ranges(chosen["ranges"])
        self._add_calls(chosen["calls"])
        self._add_waits(chosen["waits"])

    def _table(self, event: Event) -> str | None:
        """Where an event of this category belongs; one that has an earlier name gets today's."""
        name = event.cat.lower()
        name = EARLIER.get(name, name)
        if name != event.cat and name in TABLES:
            event.cat = name
            return TABLES[name]
        found = next((table for ending, table in ENDINGS.items() if name.endswith(ending)), None)
        self._known[event.cat] = found
        return found

    def _name_process(self, event: Event) -> None:
        if said := readable(bytes(event.args), Called):
            self.processes.setdefault(event.pid, set()).update(filter(None, (said.name, said.labels)))

    # -----------------------------------------------------------------------------------------------------
    # Events into rows

    def _placed(self, chosen: Sequence[Event]) -> dict[str, Iterable[Any]]:
        return {**self._timed(chosen), "track": self._tracks(chosen), "name": self._named(chosen)}

    def _ns(self, chosen: Sequence[Event]) -> Times:
        """When each begins; UNTAKEN for what is no number, or too large for one."""
        return np.fromiter((_ns(each.ts) for each in chosen), np.int64, len(chosen))

    def _timed(self, chosen: Sequence[Event]) -> dict[str, Iterable[Any]]:
        """Starts and ends. What lasts for longer than time is counted ends behind all time."""
        lasts = np.fromiter((each.dur for each in chosen), np.float64, len(chosen))
        lasts = np.clip(lasts, -LONGEST_US, LONGEST_US)
        start, ns = self._ns(chosen), np.rint(np.nan_to_num(lasts) * 1e3).astype(np.int64)
        missing = np.isnan(lasts) | (start == UNTAKEN)
        return {"start": start, "end": np.where(missing, UNTAKEN, start + ns)}

    def _named(self, chosen: Sequence[Event]) -> Iterable[int]:
        return (self.names.code(each.name or "") for each in chosen)

    def _tracks(self, chosen: Sequence[Event]) -> Iterable[int]:
        return (self.tracks.code(each.track) for each in chosen)

    def _on_devices(self, chosen: Sequence[Event], args: Sequence[Args]) -> Iterable[int]:
        for each, own in zip(chosen, args, strict=True):
            yield self.devices.code((each.pid, each.rank, each.pid if own.device is None else own.device))

    def _add_flows(self, chosen: Sequence[Event]) -> None:
        self.flows.add(
            len(chosen),
            start=self._ns(chosen),
            track=self._tracks(chosen),
            name=self._named(chosen),
            key=(hash((each.cat, each.name, each.id)) for each in chosen),
            starts=(each.ph == "s" for each in chosen),
        )

    def _add_work(self, chosen: Sequence[Event]) -> None:
        args = [_args(each) for each in chosen]
        directions = [_direction(each) for each in chosen]
        self.work.add(
            len(chosen),
            **self._placed(chosen),
            kind=(
                events.COPY if found else WORK[each.cat]
                for each, found in zip(chosen, directions, strict=True)
            ),
            device=self._on_devices(chosen, args),
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
            direction=(self.names.code(found) for _, _, found in copies),
            memory=(self.names.code(each) for each in memories),
            bytes=(own.bytes for _, own, _ in copies),
        )

    def _add_ranges(self, chosen: Sequence[Event]) -> None:
        waits = (each.cat == "phase" and (each.name or "").startswith(WAIT) for each in chosen)
        self.ranges.add(len(chosen), **self._placed(chosen), waits=waits)

    def _add_calls(self, chosen: Sequence[Event]) -> None:
        correlations = (_args(each).correlation for each in chosen)
        self.calls.add(len(chosen), **self._placed(chosen), correlation=correlations)

    def _add_waits(self, chosen: Sequence[Event]) -> None:
        kinds = [SYNCHRONIZATIONS.get(each.name or "", each.name or "unknown") for each in chosen]
        self.waits.add(
            len(chosen),
            **self._timed(chosen),
            track=self._tracks(chosen),
            kind=(self.names.code(each) for each in kinds),
            blocks=(each != events.STREAM_WAITS for each in kinds),
            correlation=(_args(each).correlation for each in chosen),
        )

    # -----------------------------------------------------------------------------------------------------
    # Events in two halves

    def _add_halves(self, chosen: Sequence[Event]) -> None:
        """Keep what begins; where it ends shows once all of the file is read."""
        wanted = [each.ph == "B" and (self._known.get(each.cat) or self._table(each)) for each in chosen]
        numbers = iter(range(len(self._begun), len(self._begun) + len(chosen)))
        self._halves.add(
            len(chosen),
            at=self._ns(chosen),
            track=self._tracks(chosen),
            event=[
                ENDS if each.ph == "E" else next(numbers) if kept else NONE
                for each, kept in zip(chosen, wanted, strict=True)
            ],
        )
        self._begun += [each for each, kept in zip(chosen, wanted, strict=True) if kept]

    def close(self) -> None:
        """Put the halves together, once all of the file is taken in. On a track they nest."""
        halves = self._halves.taken()
        order = np.lexsort((halves["at"], halves["track"]))
        ends = dict.fromkeys(range(len(self._begun)), (0, UNTAKEN))
        track = NONE
        open_: list[tuple[int, int]] = []
        for here, at, event in zip(
            *(halves[name][order].tolist() for name in ("track", "at", "event")), strict=True
        ):
            if here != track:
                track, open_ = here, []
            if event != ENDS:
                open_.append((event, at))
            elif open_:
                begun, since = open_.pop()
                ends[begun] = since, at
        whole = [
            msgspec.structs.replace(each, ph="X", dur=(end - since) / 1e3 if end != UNTAKEN else np.nan)
            for each, (since, end) in zip(self._begun, ends.values(), strict=False)
        ]
        self.add(Batch(whole))


ENDS = -2  # in place of the number of an event that begins


def _ns(us: Decimal) -> int:
    return round(us * 1000) if us.is_finite() and -LONGEST_US <= us <= LONGEST_US else UNTAKEN


def _args(event: Event) -> Args:
    try:
        return ARGS.decode(event.args)
    except UNREADABLE:
        return readable(bytes(event.args), Args) or Args()


def _direction(event: Event) -> str:
    """The direction of a copy, such as "HtoD"; nothing for other work. torch.profiler says it in a name like
    "Memcpy HtoD (Pageable -> Device)"."""
    name = event.name or ""
    if event.cat == "gpu_memcpy":
        return next(iter(name.split()[1:2]), "unknown")
    return DIRECTIONS.get(name.partition(".")[0], "") if event.cat == "device" else ""


def _memory(name: str, direction: str) -> str:
    """The host's side of "Memcpy HtoD (Pageable -> Device)": "pageable"."""
    source, _, target = name.partition("(")[2].rstrip(")").partition(" -> ")
    side = target if direction == "DtoH" else source
    return side.strip().lower() or "unknown"
