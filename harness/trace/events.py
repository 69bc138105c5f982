"""A trace in columns, whoever recorded it: what the host marked, what it called, what the devices did.

Every table is a frozen set of arrays of one length, one row per event, in no promised order. Times are
int64 nanoseconds on one clock. Names are codes into Trace.names. A thread, a stream and a device are codes
that are equal where the thing is the same one, across processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from overlap_bench.harness.common.formatting import visible_line

Times = NDArray[np.int64]
Codes = NDArray[np.int32]
Flags = NDArray[np.bool_]

KERNEL, GRAPH, PROGRAM, COPY, MEMSET = range(5)
WORK_KINDS = ("kernel", "graph", "program", "copy", "memset")
PROGRAMS = (KERNEL, GRAPH, PROGRAM)  # what makes a device busy

NONE = -1  # no such row, no such name
Progress = Callable[[str], None]  # gets a line now and then, while a file is read

TABLES = ("ranges", "calls", "work", "copies", "synchronizations")  # of a Trace
EVENT, STREAM_WAITS, STREAM, CONTEXT = "event", "stream waits for event", "stream", "context"


@dataclass(frozen=True, slots=True)
class Table:
    """What every event has."""

    start: Times
    end: Times

    def joined(self, other: Self) -> Self:
        columns = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return type(self)(*map(np.concatenate, columns))


@dataclass(frozen=True, slots=True)
class Ranges(Table):
    """What the host marked: NVTX ranges, or phases. `nests`: it was pushed and popped on its thread, so
    ranges of that thread nest; the others begin and end anywhere."""

    name: Codes
    thread: Codes
    nests: Flags


@dataclass(frozen=True, slots=True)
class Calls(Table):
    """API calls of the host that devices' work can come from."""

    thread: Codes
    name: Codes


@dataclass(frozen=True, slots=True)
class Work(Table):
    """What devices executed. `kind`: of WORK_KINDS. `call`: row in Calls that it came from, or NONE."""

    device: Codes
    stream: Codes
    kind: Codes
    name: Codes
    call: Times


@dataclass(frozen=True, slots=True)
class Copies(Table):
    """The copies in Work, once more, with what only they have. `direction` and `memory` (which kind of host
    memory, or the device's where there is none) are names; `bytes` is -1 where unknown."""

    direction: Codes
    memory: Codes
    bytes: Times


@dataclass(frozen=True, slots=True)
class Synchronizations(Table):
    """Waits for a device. `kind` is a name. `blocks`: the host's thread waits, not a stream. `called`: when
    the thread asked for it. `thread`: NONE where the call is not in the trace. `own`: row in Ranges that is
    this very wait, where phases tell of waits; NONE elsewhere."""

    kind: Codes
    blocks: Flags
    called: Times
    thread: Codes
    own: Times


@dataclass(frozen=True, slots=True)
class Trace:
    """One file. `format` says who wrote it. `devices`: names, by the codes in Work. `untold`: those of which
    the file does not tell what launched their work. `warnings`: what a reader of its numbers must know."""

    file: str
    format: str
    names: tuple[str, ...]
    devices: tuple[str, ...]
    ranges: Ranges
    calls: Calls
    work: Work
    copies: Copies
    synchronizations: Synchronizations
    untold: frozenset[int]
    warnings: tuple[str, ...]

    def rows(self) -> dict[str, int]:
        """How many there are of each."""
        return {name: len(getattr(self, name).start) for name in TABLES}

    def span(self) -> tuple[int, int]:
        """First start and last end of anything, ns."""
        filled = [table for name in TABLES if len((table := getattr(self, name)).start)]
        first = min(int(table.start.min()) for table in filled)
        return first, max(int(table.end.max()) for table in filled)


class Coder:
    """Hands out the same code for the same value, from 0 on."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._codes: dict[Hashable, int] = {}

    def code(self, value: Hashable) -> int:
        found = self._codes.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found

    def encode(self, values: NDArray[Any], read: Callable[[Any], Hashable] = lambda value: value) -> Codes:
        """The code of what `read` makes of each; values are hashed once each, in C."""
        import pandas as pd

        positions, distinct = pd.factorize(values, use_na_sentinel=False)
        codes = np.fromiter((self.code(read(each)) for each in distinct.tolist()), np.int32, len(distinct))
        encoded: Codes = codes[positions]
        return encoded


def take(column: NDArray[Any], rows: Times, otherwise: int) -> NDArray[Any]:
    """`column` at each row, `otherwise` where the row is NONE."""
    if not len(column):
        return np.full(len(rows), otherwise, column.dtype)
    return np.where(rows == NONE, otherwise, column[rows])


def readable(trace: Trace) -> Trace:
    """The trace without characters in its texts that move a terminal's cursor, or are none: each is written
    as its escape. Names that become equal become one."""
    trace = replace(
        trace,
        file=visible_line(trace.file),
        devices=tuple(map(visible_line, trace.devices)),
        warnings=tuple(map(visible_line, trace.warnings)),
    )
    names = Coder()
    code = np.array([names.code(visible_line(name)) for name in trace.names], np.int32)
    if tuple(names.values) == trace.names:
        return trace
    return replace(
        trace,
        names=tuple(names.values),
        ranges=replace(trace.ranges, name=code[trace.ranges.name]),
        calls=replace(trace.calls, name=code[trace.calls.name]),
        work=replace(trace.work, name=code[trace.work.name]),
        copies=replace(
            trace.copies, direction=code[trace.copies.direction], memory=code[trace.copies.memory]
        ),
        synchronizations=replace(trace.synchronizations, kind=code[trace.synchronizations.kind]),
    )
