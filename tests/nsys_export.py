"""Makes small exports as nsys would, in whatever shape: a table has the columns of its first row."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

PREFIX = "CUPTI_ACTIVITY_KIND_"
Rows = Sequence[Mapping[str, object]]


def write(path: Path, tables: Mapping[str, Rows], strings: Sequence[str] = ()) -> Path:
    """A table for each that has rows; `strings` are StringIds 0, 1, ..."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(strings)))
        for name, rows in tables.items():
            columns = list(rows[0])
            database.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            marks = ", ".join("?" for _ in columns)
            database.executemany(
                f"INSERT INTO {name} VALUES ({marks})", [[row[column] for column in columns] for row in rows]
            )
        database.commit()
    return path


def process(pid: int) -> int:
    """A global id of a process: a machine in front, room for the thread behind."""
    return 1 << 48 | pid << 24


def kernel(
    start: int,
    end: int,
    *,
    pid: int = 1,
    device: int = 0,
    stream: int = 7,
    correlation: int = -1,
    name: int = 0,
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "deviceId": device,
        "contextId": 1,
        "streamId": stream,
        "correlationId": correlation,
        "globalPid": process(pid),
        "demangledName": name,
        "shortName": name,
    }


def graph(start: int, end: int, *, pid: int = 1, correlation: int = -1, number: int = 3) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "deviceId": 0,
        "contextId": 1,
        "streamId": 7,
        "correlationId": correlation,
        "globalPid": process(pid),
        "graphId": number,
        "graphExecId": 9,
    }


def copy(
    start: int,
    end: int,
    *,
    kind: int = 1,
    source: int = 1,
    target: int = 2,
    size: int = 1024,
    device: int = 0,
    correlation: int = -1,
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "deviceId": device,
        "contextId": 1,
        "streamId": 7,
        "correlationId": correlation,
        "globalPid": process(1),
        "bytes": size,
        "copyKind": kind,
        "srcKind": source,
        "dstKind": target,
    }


def call(
    start: int, end: int, *, pid: int = 1, thread: int = 5, correlation: int = -1, name: int = 0
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "globalTid": process(pid) | thread,
        "correlationId": correlation,
        "nameId": name,
    }


def synchronization(
    start: int, end: int, *, pid: int = 1, correlation: int = -1, kind: int = 3
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "deviceId": 0,
        "contextId": 1,
        "streamId": 7,
        "correlationId": correlation,
        "globalPid": process(pid),
        "syncType": kind,
    }


def nvtx(
    start: int,
    end: int | None,
    text: str | None,
    *,
    pid: int = 1,
    thread: int = 5,
    kind: int = 59,
    domain: int = 0,
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "eventType": kind,
        "text": text,
        "globalTid": process(pid) | thread,
        "domainId": domain,
    }
