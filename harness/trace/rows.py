"""What both readers do with the rows of a file: leave out what is no event, and find what launched what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlap_bench.harness.trace import events, pairs, times
from overlap_bench.harness.trace.events import NONE, Calls, Codes, Copies, Flags, Work
from overlap_bench.harness.trace.pairs import Ids

Columns = dict[str, NDArray[Any]]  # of equal length

ONE_OF = {"ranges": "range", "calls": "call", "waits": "wait"}
OF_WORK = ("kernel", "graph launch", "program", "copy", "memset")  # by events.WORK_KINDS
PLURALS = {"copy": "copies", "graph launch": "graph launches"}
MOST_UNTOLD = 0.01  # of a device's work: more, and its idle time is not split
MOST_EARLY = 0.5


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Counts by what they are of."""

    untaken: Counter[str]
    unfinished: Counter[str]

    def warnings(self) -> Iterator[str]:
        for counts, why in (
            (self.untaken, "whose time was not taken (it is 0, missing, or far from all others)"),
            (self.unfinished, "that did not end in the trace (no end, or one before the start)"),
        ):
            things = [counted(count, name) for name, count in counts.items()]
            if things:
                busier = any(counts[name] for name in OF_WORK)
                more = "; the devices were busier than shown" if busier else ""
                yield f"left out: {', '.join(things)} {why}{more}"


@dataclass(frozen=True, slots=True)
class Launched:
    """Calls, and the work that came from them. `columns`: all that the file says of the work, `process`: its,
    NONE where it cannot be told. `untold`: devices."""

    calls: Calls
    work: Work
    columns: Columns
    process: Codes
    untold: frozenset[int]
    warnings: tuple[str, ...]


def sound(tables: Mapping[str, Columns]) -> tuple[dict[str, Columns], LeftOut]:
    """The tables without rows that are at fault. `work` has its `kind`."""
    found = times.faults({name: (rows["start"], rows["end"]) for name, rows in tables.items()})
    left_out = LeftOut(Counter(), Counter())
    kept = dict(tables)
    for table, faults in found.items():
        kept[table] = only(tables[table], ~(faults.untaken | faults.unfinished))
        left_out.untaken.update(_names(table, only(tables[table], faults.untaken)))
        left_out.unfinished.update(_names(table, only(tables[table], faults.unfinished)))
    return kept, left_out


def _names(table: str, rows: Columns) -> list[str]:
    """What each row is."""
    if table == "work":
        return [OF_WORK[kind] for kind in rows["kind"].tolist()]
    return [ONE_OF[table]] * len(rows["start"])


def only(rows: Columns, chosen: NDArray[Any]) -> Columns:
    return {name: column[chosen] for name, column in rows.items()}


def numbered(chosen: Flags) -> NDArray[np.int32]:
    """The place of each chosen row among the chosen ones, NONE for the others."""
    return np.where(chosen, np.cumsum(chosen) - 1, NONE).astype(np.int32)


def copies(work: Columns, of_copies: Columns) -> Copies:
    """The copies among the work that is left; `copy` of the work is the row of each in `of_copies`."""
    copy = work["copy"] != NONE
    only_they_have = only(of_copies, work["copy"][copy])
    return Copies(work["start"][copy], work["end"][copy], **only_they_have)


def ids(rows: Columns) -> Ids:
    """What they are joined by."""
    correlation = np.maximum(rows["correlation"], NONE)
    return Ids(rows["process"], correlation, rows["thread"], rows["start"], rows["end"])


def launched(
    calls: Columns, work: Columns, names: Sequence[str], devices: Sequence[str], left_out: LeftOut
) -> Launched:
    """What launched each piece of work, whose `thread` is its stream; `left_out` also gets the work whose
    start was not taken, for its call came after."""
    graphs = np.array(["Graph" in name for name in names], bool)
    found = pairs.of_work(ids(calls), ids(work), work["device"], graphs[calls["name"]])
    untaken = found.early & times.near_zero(work["start"])
    early = found.early & ~untaken
    of_device = _by_device(work["device"], np.ones_like(early), len(devices))
    untold = _by_device(work["device"], found.untold, len(devices)) > MOST_UNTOLD * of_device
    untold |= _by_device(work["device"], early, len(devices)) > MOST_EARLY * of_device
    # Where so much is open, the rest is not to be trusted either: of work whose own call is not in the file,
    # another's looks like it.
    call = np.where(untold[work["device"]], NONE, found.call)[~untaken]
    warnings = tuple(_warnings(found.untold, early, work["device"], devices, untold))
    left_out.untaken.update(_names("work", only(work, untaken)))
    work = only(work, ~untaken)
    called = events.take(calls["process"], call, NONE)
    return Launched(
        calls=Calls(calls["start"], calls["end"], calls["thread"], calls["name"]),
        work=Work(
            work["start"], work["end"], work["device"], work["thread"], work["kind"], work["name"], call
        ),
        columns=work,
        process=np.where(work["process"] == NONE, called, work["process"]),
        untold=frozenset(np.flatnonzero(untold).tolist()),
        warnings=warnings,
    )


def _by_device(device: Codes, chosen: Flags, devices: int) -> NDArray[np.int64]:
    return np.bincount(device[chosen], minlength=devices)


def _warnings(
    untold: Flags, early: Flags, device: Codes, devices: Sequence[str], unsplit: Flags
) -> Iterator[str]:
    for which, chosen in ((unsplit, unsplit[device]), (~unsplit, ~unsplit[device])):
        rows = np.flatnonzero(which).tolist()
        shown = f"device{'s' if len(rows) > 1 else ''} {', '.join(devices[each] for each in rows)}"
        of = int(chosen.sum())
        lost = (
            "None of it is in Launch to execution, and the idle time is not split"
            if which is unsplit
            else "It is not in Launch to execution"
        )
        if count := int((untold & chosen).sum()):
            yield (
                f"what launched {count:,} of {of:,} pieces of work of {shown} cannot be told, for several "
                "calls have their ids: this looks like several processes, ranks or nodes in one file. "
                f"{lost}; each rank's own trace tells"
            )
        if count := int((early & chosen).sum()):
            yield (
                f"{count:,} of {of:,} pieces of work of {shown} would begin before the call that has their "
                "id: the device's clock is another, or the call is of another process. "
                f"{lost}"
            )


def counted(count: int, name: str) -> str:
    """A count with its noun."""
    return f"{count:,} {name if count == 1 else PLURALS.get(name, f'{name}s')}"
