"""Exports of nsys with names that are no text, tables by other names, and cells that are no numbers."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace import trace_file
from overlap_bench.harness.trace.events import Trace
from tests.support import nsys_export as made
from tests.support.traces import export, part, parts, values

KERNEL, RUNTIME = made.PREFIX + "KERNEL", made.PREFIX + "RUNTIME"
TABLES: dict[str, made.Rows] = {
    "NVTX_EVENTS": [made.nvtx(0, 90_000, "step"), made.nvtx(100_000, 190_000, "step")],
    RUNTIME: [made.call(1000 + at, 5000 + at, correlation=at + 1) for at in (0, 100_000)],
    KERNEL: [made.kernel(10_000 + at, 60_000 + at, correlation=at + 1, name=1) for at in (0, 100_000)],
    made.PREFIX + "MEMCPY": [made.copy(63_000, 64_000)],
}
STRINGS = ("cudaLaunchKernel_v7000", "gemm")


def sound(folder: Path) -> Trace:
    return export(folder, TABLES, STRINGS)


def changed(folder: Path, script: str) -> Trace:
    """The export after some SQL."""
    path = made.write(folder / "changed.sqlite", TABLES, STRINGS)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(script)
    trace = trace_file.read(path)
    path.unlink()
    return trace


def said(trace: Trace) -> list[object]:
    found = parts(trace)
    return [found[name].rows for name in ("devices", "kernels", "launches", "ranges", "calls", "copies")]


def renamed(table: str, name: str) -> str:
    return f'ALTER TABLE {table} RENAME TO "{name}";'


def test_a_table_is_read_by_a_name_with_a_version(tmp_path: Path) -> None:
    wanted = said(sound(tmp_path))
    for table in (*TABLES, "StringIds"):
        for name in (f"{table}_V2", f"{table}_V13", f"{table}_v3"):
            trace = changed(tmp_path, renamed(table, name))
            assert (said(trace), trace.warnings) == (wanted, ()), name
    lower = changed(tmp_path, renamed(KERNEL, "other") + renamed("other", KERNEL.lower()))
    assert said(lower) == wanted
    both = changed(tmp_path, f"CREATE TABLE {KERNEL}_V2 AS SELECT * FROM {KERNEL}; DELETE FROM {KERNEL};")
    assert (said(both), both.warnings) == (wanted, ())


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (KERNEL, f"{KERNEL}_EXT"),
        (KERNEL, f"{KERNEL}10"),
        (RUNTIME, "CUPTI_ACTIVITY_KIND_DRIVER"),
        ("NVTX_EVENTS", "NVTX_RANGES"),
        (RUNTIME, "CUDA_API_CALLS"),
    ],
)
def test_a_table_by_an_unknown_name_is_named(tmp_path: Path, table: str, name: str) -> None:
    trace = changed(tmp_path, renamed(table, name))
    assert trace.warnings == (
        f"the export has a table {name}, which is not known here: its rows are not in these numbers",
    )
    beside = changed(tmp_path, f'CREATE TABLE "{name}" AS SELECT * FROM {table};')
    assert (said(beside), beside.warnings) == (said(sound(tmp_path)), trace.warnings)


def test_a_table_without_times_and_an_export_without_strings_are_named(tmp_path: Path) -> None:
    trace = changed(tmp_path, f"ALTER TABLE {KERNEL} DROP COLUMN end;")
    assert trace.warnings == (
        f"the export's table {KERNEL} has no column start or no end: it is left out; export it again",
    )
    trace = changed(tmp_path, "DROP TABLE StringIds;")
    assert values(part(trace, "kernels"), "0", "unknown 1")["count"] == 2
    assert trace.warnings[0].startswith("the export has no table StringIds")
    assert "is not known (unknown 0)" in trace.warnings[1]


@pytest.mark.parametrize("column", ["deviceId", "contextId", "streamId", "globalPid", "demangledName"])
def test_a_column_that_is_missing_costs_no_number(tmp_path: Path, column: str) -> None:
    trace = changed(tmp_path, f"ALTER TABLE {KERNEL} DROP COLUMN {column};")
    assert (said(trace), trace.warnings) == (said(sound(tmp_path)), ())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("CAST(x'67E56D6DFF' AS TEXT)", r"g\xe5mm\xff"),
        ("x'67E56D6DFF'", r"g\xe5mm\xff"),
        ("CAST(x'61EDA08062' AS TEXT)", r"a\xed\xa0\x80b"),
        ("'a' || char(27) || '[31m' || char(10) || char(155)", r"a\x1b[31m\n\x9b"),
        ("5", "5"),
        ("NULL", "unknown 1"),
    ],
)
def test_a_name_of_any_bytes_is_shown_without_what_moves_a_cursor(
    tmp_path: Path, value: str, shown: str
) -> None:
    nullable = (
        "CREATE TABLE other (id, value); INSERT INTO other SELECT * FROM StringIds; DROP TABLE StringIds;"
    )
    names = changed(
        tmp_path,
        nullable + renamed("other", "StringIds") + f"UPDATE StringIds SET value = {value} WHERE id = 1;"
        f"UPDATE NVTX_EVENTS SET text = COALESCE({value}, 'unknown 1');"
        f"CREATE TABLE DIAGNOSTIC_EVENT (severity, text); INSERT INTO DIAGNOSTIC_EVENT VALUES (3, {value});",
    )
    assert [row.key for row in part(names, "kernels").rows] == [("0", shown)]
    assert [row.key for row in part(names, "ranges").rows] == [(shown,)]
    assert not any("\x1b" in line or "\x9b" in line for line in names.warnings)


@pytest.mark.parametrize("table", [KERNEL, RUNTIME, "NVTX_EVENTS"])
def test_rows_without_a_time_or_an_end_are_counted(tmp_path: Path, table: str) -> None:
    one = {KERNEL: "kernel", RUNTIME: "call", "NVTX_EVENTS": "range"}[table]
    wanted = said(sound(tmp_path))
    for start, end, why in (
        ("0", "0", "whose time was not taken"),
        ("NULL", "5", "whose time was not taken"),
        ("9223372036854775807", "5", "whose time was not taken"),
        ("50", "9223372036854775807", "whose time was not taken"),
        ("50", "0", "that did not end"),
        ("50", "NULL", "that did not end"),
        ("50", "-1", "that did not end"),
    ):
        columns = [name for name in TABLES[table][0] if name not in ("start", "end", "correlationId")]
        copied = f"INSERT INTO {table} (start, end, {', '.join(columns)}) SELECT {start}, {end}, "
        trace = changed(tmp_path, f"{copied} {', '.join(columns)} FROM {table} LIMIT 1;")
        assert said(trace) == wanted, (start, end)
        assert len(trace.warnings) == 1
        assert trace.warnings[0].startswith(f"left out: 1 {one} {why}")


def test_an_id_that_is_missing_costs_no_row(tmp_path: Path) -> None:
    trace = changed(tmp_path, f"UPDATE {KERNEL} SET globalPid = NULL WHERE correlationId = 1;")
    assert (trace.rows(), trace.devices) == (sound(tmp_path).rows(), ("0",))


@pytest.mark.parametrize("cell", ["start = 'soon'", "end = x'ff'", "deviceId = 9e999"])
def test_a_cell_that_is_no_number_is_of_no_export(tmp_path: Path, cell: str) -> None:
    with pytest.raises(BadFile, match="KERNEL has a cell that is no number"):
        changed(tmp_path, f"UPDATE {KERNEL} SET {cell} WHERE correlationId = 1;")
