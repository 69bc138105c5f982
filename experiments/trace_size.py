"""How large a trace can be: `python -m experiments.trace_size make EXPORT`, then `... measure`.

`make` repeats the rows of an nsys export, each time later and with correlation ids of its own, until the file
has 1 GB; `measure` runs `bench trace` on it in a process of its own, five times, and takes wall time and peak
memory. Two steps, because making takes as long as measuring.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from experiments.record import write_result

BYTES = 10**9
LARGE = Path(tempfile.gettempdir()) / "trace_size.sqlite"
BENCH = (sys.executable, "-c", "from harness.cli import main; main()")
TIMES = ("start", "end", "timestamp")  # columns that are shifted
RUNS = 5


def make(export: Path) -> None:
    """Rows of every table with a time, over and over."""
    shutil.copyfile(export, LARGE)
    LARGE.chmod(0o644)
    with closing(sqlite3.connect(LARGE)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {
            name: [column for (column,) in database.execute(f"SELECT name FROM pragma_table_info('{name}')")]
            for name in names
        }
        timed = {name: found for name, found in columns.items() if {"start", "timestamp"} & set(found)}
        ranges = [database.execute(f"SELECT min(start), max(end) FROM {name}").fetchone()
                  for name, found in timed.items() if "start" in found]  # fmt: skip
        found = [each for each in ranges if each[0] is not None]
        span = max(high for _, high in found) - min(low for low, _ in found)
        ids = max(
            database.execute(f"SELECT COALESCE(max(correlationId), 0) FROM {name}").fetchone()[0]
            for name, found in timed.items()
            if "correlationId" in found
        )
        originals = {name: database.execute(f"SELECT max(rowid) FROM {name}").fetchone()[0] for name in timed}
        repeat = 0
        while LARGE.stat().st_size < BYTES:
            repeat += 1
            for name, found in timed.items():
                shifted = ", ".join(
                    f"{each} + {repeat * span}" if each in TIMES
                    else f"{each} + {repeat * ids}" if each == "correlationId"
                    else each
                    for each in found
                )  # fmt: skip
                rows = f"SELECT {shifted} FROM {name} WHERE rowid <= ?"
                database.execute(f"INSERT INTO {name} {rows}", (originals[name] or 0,))
            database.commit()
    print(f"{LARGE}: {LARGE.stat().st_size:,} bytes, the rows {repeat + 1} times")


def analyse() -> tuple[float, float, int]:
    """Wall seconds, peak memory in GiB and lines of progress of one `bench trace`."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [*BENCH, "trace", str(LARGE), "--format", "json"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    lines = child.stderr.read().decode().splitlines()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, lines
    return time.perf_counter() - began, usage.ru_maxrss / 2**20, len(lines)


def count() -> int:
    """Rows that are read of the file."""
    tables = ("NVTX_EVENTS", *(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in
              ("RUNTIME", "KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET", "SYNCHRONIZATION")))  # fmt: skip
    with closing(sqlite3.connect(LARGE)) as database:
        known = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        found = (database.execute(f"SELECT max(rowid) FROM {name}").fetchone()[0] for name in tables
                 if name in known)  # fmt: skip
        return sum(each or 0 for each in found)


def measure() -> None:
    runs = [analyse() for _ in range(RUNS)]
    seconds, memory, lines = zip(*runs, strict=True)
    size = LARGE.stat().st_size
    write_result(
        "trace_size",
        title=f"bench trace of an nsys export of {size / 1e9:.2f} GB, {RUNS} runs, the file in memory",
        header=["rows", "median, s", "slowest, s", "peak memory, GiB", "lines of progress", "goal"],
        rows=[
            [
                f"{count():,}",
                f"{sorted(seconds)[RUNS // 2]:.1f}",
                f"{max(seconds):.1f}",
                f"{max(memory):.2f}",
                str(min(lines)),
                "60 s, 4 GiB",
            ]
        ],
        data={"bytes": size, "rows": count(), "seconds": seconds, "peak_gib": memory, "lines": lines},
    )


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        measure()
