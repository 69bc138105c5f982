"""Makes small exports as nsys would, in whatever shape: a table has the columns of its first row."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

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


def on_device(
    start: int,
    end: int,
    *,
    pid: int = 1,
    device: int = 0,
    stream: int = 7,
    correlation: int = -1,
    **more: object,
) -> dict[str, object]:
    return {
        "start": start,
        "end": end,
        "deviceId": device,
        "contextId": 1,
        "streamId": stream,
        "correlationId": correlation,
        "globalPid": process(pid),
        **more,
    }


def kernel(start: int, end: int, *, name: int = 0, **ids: int) -> dict[str, object]:
    return on_device(start, end, demangledName=name, shortName=name, **ids)


def graph(start: int, end: int, **ids: int) -> dict[str, object]:
    return on_device(start, end, graphId=3, graphExecId=9, **ids)


def copy(
    start: int,
    end: int,
    *,
    kind: int = 1,
    source: int = 1,
    target: int = 2,
    size: int = 1024,
    **ids: int,
) -> dict[str, object]:
    return on_device(start, end, bytes=size, copyKind=kind, srcKind=source, dstKind=target, **ids)


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


def synchronization(start: int, end: int, *, kind: int = 3, **ids: int) -> dict[str, object]:
    return on_device(start, end, syncType=kind, **ids)


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


def random_export(path: Path, seed: int, rows: int = 400) -> Path:
    """Two processes with a device and a thread each: nested ranges, calls in them, work that overlaps over
    streams, waits. Some work has no call in the trace, and ids of calls clash between the processes."""
    random = Random(seed)
    tables: dict[str, list[dict[str, object]]] = {}

    def add(table: str, row: dict[str, object]) -> None:
        tables.setdefault(table, []).append(row)

    for pid in (1, 2):
        now, free = 1000, 0
        for correlation in range(rows):
            now += random.randint(0, 40)
            around = now, now + random.randint(100, 300)
            add(
                "NVTX_EVENTS",
                nvtx(*around, f"aten::op{random.randint(0, 5)}, op_id = {correlation}", pid=pid),
            )
            inner = around[0] + random.randint(0, 20), around[1] - random.randint(1, 20)
            add("NVTX_EVENTS", nvtx(*inner, random.choice(("launch", "copy_")), pid=pid))
            begin = inner[0] + random.randint(-25, 30)
            called = begin, begin + random.randint(1, 40)
            known = random.random() < 0.8
            if known:
                add(
                    PREFIX + "RUNTIME",
                    call(*called, pid=pid, correlation=correlation, name=random.randint(0, 2)),
                )
            free = max(free, called[0]) + random.randint(0, 60)
            done = free + random.randint(1, 150)
            ids = {"pid": pid, "device": pid - 1, "correlation": correlation}
            match random.randint(0, 5):
                case 0 | 1 | 2:
                    add(PREFIX + "KERNEL", kernel(free, done, stream=random.randint(7, 8),
                                                  name=random.randint(0, 2), **ids))  # fmt: skip
                case 3 | 4:
                    kind, source, target = random.choice(
                        ((1, 0, 2), (1, 1, 2), (2, 2, 0), (2, 2, 1), (8, 2, 2))
                    )
                    add(PREFIX + "MEMCPY", copy(free, done, kind=kind, source=source, target=target,
                                                size=2 ** random.randint(0, 30), **ids))  # fmt: skip
                case 5 if known:
                    wait = synchronization(
                        *called, pid=pid, correlation=correlation, kind=random.choice((2, 3))
                    )
                    add(PREFIX + "SYNCHRONIZATION", wait)
            free = free if random.random() < 0.3 else done
            now = around[1]
    tables[PREFIX + "MEMSET"] = [{**copy(5, 9), "value": 0}]
    return write(path, tables, ("gemm", "softmax", "norm"))
