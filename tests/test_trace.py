"""Traces: what is read of each format, what is said of it against plain SQL, and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import BadSetting
from harness.pages import markdown_page
from harness.trace import analysis, events, intervals, report, trace_file
from harness.trace.analysis import Part
from harness.trace.events import Trace
from tests import bench_command
from tests import nsys_export as made

NS = 1e-9


def part(trace: Trace, name: str) -> Part:
    return next(each for each in analysis.analyse(trace) if each.name == name)


def values(found: Part, *key: str) -> dict[str, float | None]:
    """One row, by measure."""
    (row,) = [each for each in found.rows if each.key == key]
    return {name: value for (name, _), value in zip(found.measures, row.values, strict=True)}


def sums(found: Part) -> dict[tuple[str, ...], tuple[int, int]]:
    """Count and total ns of each row."""
    return {
        row.key: (int(row.values[0] or 0), _ns(values(found, *row.key)["total_ms"])) for row in found.rows
    }


def _ns(ms: float | None) -> int:
    return round((ms or 0) * 1e6)


def export(folder: Path, tables: dict[str, made.Rows], strings: tuple[str, ...] = ("gemm",)) -> Trace:
    return trace_file.read(made.write(folder / "export.sqlite", tables, strings))


# ---------------------------------------------------------------------------------------------------------
# Exports, the real one among them, against SQL over the same file

BUSY = """
    WITH rows AS (SELECT deviceId, start, end, max(end) OVER (
        PARTITION BY deviceId ORDER BY start, end ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach
        FROM ({work}))
    SELECT deviceId, sum(max(0, end - max(start, COALESCE(reach, start)))) FROM rows GROUP BY deviceId
"""
KERNELS = "SELECT deviceId, start, end FROM CUPTI_ACTIVITY_KIND_KERNEL"
WORK = KERNELS + "".join(
    f" UNION ALL SELECT deviceId, start, end FROM CUPTI_ACTIVITY_KIND_{kind}" for kind in ("MEMCPY", "MEMSET")
)
NAME = """
    CASE WHEN instr(text, ', seq = ') > 0 THEN substr(text, 1, instr(text, ', seq = ') - 1)
         WHEN instr(text, ', op_id = ') > 0 THEN substr(text, 1, instr(text, ', op_id = ') - 1)
         ELSE text END
"""
RANGES = f"SELECT {NAME}, count(*), sum(end - start) FROM NVTX_EVENTS WHERE eventType IN (59, 60) GROUP BY 1"
COPIES = """
    SELECT CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' ELSE 'DtoD' END,
           CASE CASE copyKind WHEN 2 THEN dstKind ELSE srcKind END
               WHEN 0 THEN 'pageable' WHEN 1 THEN 'pinned' ELSE 'device' END,
           CASE WHEN bytes <= 4096 THEN 'to 4 KiB' WHEN bytes <= 65536 THEN 'to 64 KiB'
               WHEN bytes <= 1048576 THEN 'to 1 MiB' WHEN bytes <= 16777216 THEN 'to 16 MiB'
               WHEN bytes <= 268435456 THEN 'to 256 MiB' ELSE 'larger' END,
           count(*), sum(bytes), sum(end - start)
    FROM CUPTI_ACTIVITY_KIND_MEMCPY GROUP BY 1, 2, 3
"""
SYNCHRONIZATIONS = f"""
    SELECT CASE syncType WHEN 2 THEN 'stream waits for event' ELSE 'stream' END, COALESCE((
            SELECT {NAME} FROM NVTX_EVENTS AS around
            WHERE around.globalTid = calls.globalTid
                AND around.start <= calls.start AND around.end > calls.start
            ORDER BY around.start DESC, around.end LIMIT 1), '(no range)'),
        count(*), sum(waits.end - waits.start)
    FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION AS waits JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS calls
        ON calls.correlationId = waits.correlationId AND calls.globalTid >> 24 = waits.globalPid >> 24
    GROUP BY 1, 2
"""
LATENCIES = """
    SELECT kernels.start - calls.start
    FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernels JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS calls
        ON calls.correlationId = kernels.correlationId AND calls.globalTid >> 24 = kernels.globalPid >> 24
"""
BY_KERNEL = """
    SELECT value, count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL
    JOIN StringIds ON StringIds.id = demangledName GROUP BY demangledName
"""


@dataclass(frozen=True, slots=True)
class Checked:
    path: Path
    trace: Trace


@pytest.fixture(scope="module", params=["real", "seed 1", "seed 2"])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The real export, and made ones in which more than one thing at a time is odd."""
    if request.param == "real":
        path = request.getfixturevalue("h100_export")
    else:
        name, seed = tmp_path_factory.mktemp("made") / "export.sqlite", int(request.param.split()[1])
        path = made.random_export(name, seed)
    return Checked(path, trace_file.read(path))


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(sql).fetchall()


def test_every_row_of_an_export_is_read(checked: Checked) -> None:
    rows = {
        "ranges": ask(checked.path, "SELECT count(*) FROM NVTX_EVENTS")[0][0],
        "calls": ask(checked.path, "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_RUNTIME")[0][0],
        "work": ask(checked.path, f"SELECT count(*) FROM ({WORK})")[0][0],
        "copies": ask(checked.path, "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_MEMCPY")[0][0],
        "synchronizations": ask(checked.path, "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")[0][
            0
        ],
    }
    assert checked.trace.rows() == rows


def test_the_real_export_says_who_wrote_it(h100_export: Path) -> None:
    assert trace_file.read(h100_export).format == "nsys export, 2026.2.1.210, schema 3.25.0"


HOST = Path(__file__).with_name("fixtures") / "nsys" / "host_2022.sqlite"
# The export of Nsight Systems 2022.4 has its names in StringIds and its domains as rows.
HOST_RANGES = """
    SELECT (SELECT text FROM NVTX_EVENTS AS made WHERE made.eventType = 75 AND made.domainId = ranges.domainId
            AND made.globalTid >> 24 = ranges.globalTid >> 24) || '/' || value, count(*), sum(end - start)
    FROM NVTX_EVENTS AS ranges JOIN StringIds ON StringIds.id = textId WHERE eventType = 59 GROUP BY 1
"""


def test_the_engines_own_export_without_a_gpu_has_its_ranges_as_sql_says_and_one_warning() -> None:
    trace = trace_file.read(HOST)
    assert trace.format == "nsys export, 2022.4.2.1, schema 3.0.0"
    assert sums(part(trace, "ranges")) == {
        (name,): (count, total) for name, count, total in ask(HOST, HOST_RANGES)
    }
    (warning,) = trace.warnings
    assert warning.startswith("the export has no GPU rows")
    assert {each.name: len(each.rows) for each in analysis.analyse(trace) if each.name != "ranges"} == {
        "devices": 0,
        "synchronizations": 0,
        "copies": 0,
        "kernels": 0,
        "launches": 0,
    }


def test_the_engines_own_export_has_each_role_phase_and_step() -> None:
    """What Nsight Systems saw of a window of 24 steps: domain, category, registered string, payload."""
    rows = ask(
        HOST,
        """
        SELECT domains.text, StringIds.value, categories.text, count(*), min(ranges.int64Value),
            max(ranges.int64Value)
        FROM NVTX_EVENTS AS ranges JOIN StringIds ON StringIds.id = ranges.textId
        JOIN NVTX_EVENTS AS domains ON domains.eventType = 75 AND domains.domainId = ranges.domainId
            AND domains.globalTid >> 24 = ranges.globalTid >> 24
        JOIN NVTX_EVENTS AS categories ON categories.eventType = 33 AND categories.domainId = ranges.domainId
            AND categories.category = ranges.category AND categories.globalTid >> 24 = ranges.globalTid >> 24
        WHERE ranges.eventType = 59 GROUP BY 1, 2, 3
        """,
    )
    assert [name for _, name, *_ in rows] == [category for _, _, category, *_ in rows]
    steps = {(domain, name): last - first + 1 for domain, name, _, _, first, last in rows}
    for phase in ("recv", "schedule", "metadata", "h2d", "launch", "wait.copy_done", "append", "output"):
        assert steps["engine", phase] == 24
    assert steps["device process", "program"] == 24
    assert {domain for domain, *_ in rows} == {"engine", "device process", "load generator", "profile"}


def test_busy_and_idle_of_an_export_are_what_sql_says(checked: Checked) -> None:
    found = part(checked.trace, "devices")
    busy = dict(ask(checked.path, BUSY.format(work=KERNELS)))
    active = dict(ask(checked.path, BUSY.format(work=WORK)))
    ((first, last),) = ask(checked.path, f"SELECT min(start), max(end) FROM ({WORK})")
    assert {row.key[0] for row in found.rows} == {str(device) for device in busy}
    for device in busy:
        row = values(found, str(device))
        assert row["window_ms"] == pytest.approx((last - first) / 1e6, rel=NS)
        assert row["busy_ms"] == pytest.approx(busy[device] / 1e6, rel=NS)
        assert row["copy_only_ms"] == pytest.approx((active[device] - busy[device]) / 1e6, rel=NS)
        assert row["idle_ms"] == pytest.approx((last - first - active[device]) / 1e6, rel=NS)
        waits = [row[f"{each}_ms"] for each in ("host_wait", "sync_wait", "launch_wait", "other")]
        assert min(each for each in waits if each is not None) >= 0
        assert sum(each or 0 for each in waits) == pytest.approx(row["idle_ms"], rel=NS)


def test_ranges_of_an_export_are_what_sql_says(checked: Checked) -> None:
    asked = {(name,): (count, total) for name, count, total in ask(checked.path, RANGES)}
    assert sums(part(checked.trace, "ranges")) == asked


def test_copies_of_an_export_are_what_sql_says(checked: Checked) -> None:
    found = part(checked.trace, "copies")
    asked = {row[:3]: row[3:] for row in ask(checked.path, COPIES)}
    assert sums(found) == {key: (count, total) for key, (count, _, total) in asked.items()}
    for key, (_, amount, _) in asked.items():
        assert values(found, *key)["MiB"] == amount / 2**20
    assert {key[1] for key in asked if key[0] == "HtoD"} == {"pageable", "pinned"}


def test_synchronizations_of_an_export_are_what_sql_says(checked: Checked) -> None:
    asked = {row[:2]: row[2:] for row in ask(checked.path, SYNCHRONIZATIONS)}
    assert sums(part(checked.trace, "synchronizations")) == asked


def test_kernels_of_an_export_are_what_sql_says(checked: Checked) -> None:
    asked = {(name,): (count, total) for name, count, total in ask(checked.path, BY_KERNEL)}
    assert sums(part(checked.trace, "kernels")) == asked


def test_latencies_of_an_export_are_what_sql_says(checked: Checked) -> None:
    row = values(part(checked.trace, "launches"), "kernel", "any")
    asked = np.array(ask(checked.path, LATENCIES)).ravel() / 1e3
    assert row["count"] == len(asked)
    wanted = np.percentile(asked, (50, 95, 99))
    assert [row["p50_us"], row["p95_us"], row["p99_us"]] == pytest.approx(wanted.tolist(), rel=NS)


# ---------------------------------------------------------------------------------------------------------
# Idle time

SPLIT: dict[str, made.Rows] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        made.kernel(1000, 2000, correlation=1),
        made.kernel(5000, 6000, correlation=2),
        made.kernel(7000, 8000, correlation=3),
        made.kernel(9000, 9500, correlation=99),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [made.copy(9500, 10000, correlation=4)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [
        made.call(500, 600, correlation=1),
        made.call(2400, 3300, correlation=7),
        made.call(4000, 4500, correlation=2),
        made.call(4600, 4700, correlation=3),
        made.call(4700, 4800, correlation=4),
    ],
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [
        made.synchronization(2500, 3200, correlation=7),
        made.synchronization(3400, 3900, correlation=7, kind=2),
    ],
}


def test_idle_time_is_split_by_what_the_launching_thread_did(tmp_path: Path) -> None:
    """2000 to 5000: the thread was in a stream synchronization for 700 (the stream wait blocks no thread),
    elsewhere for 1300, and 1000 in the launch. 6000 to 7000 the work was queued, 8000 to 9000 its call is not
    known."""
    row = values(part(export(tmp_path, SPLIT), "devices"), "0")
    assert row == pytest.approx(
        {
            "window_ms": 0.009,
            "busy_ms": 0.0035,
            "busy": 3500 / 9000,
            "copy_only_ms": 0.0005,
            "idle_ms": 0.005,
            "host_wait_ms": 0.0013,
            "sync_wait_ms": 0.0007,
            "launch_wait_ms": 0.001,
            "other_ms": 0.002,
        }
    )


def test_another_threads_synchronization_is_not_the_launching_threads(tmp_path: Path) -> None:
    tables = {name: [dict(row) for row in rows] for name, rows in SPLIT.items()}
    tables["CUPTI_ACTIVITY_KIND_RUNTIME"][1]["globalTid"] = made.process(1) | 6
    row = values(part(export(tmp_path, tables), "devices"), "0")
    assert row["sync_wait_ms"] == 0
    assert row["host_wait_ms"] == pytest.approx(0.002)


def test_a_device_that_stops_early_is_idle_to_the_end_of_the_last(tmp_path: Path) -> None:
    kernels = [made.kernel(0, 100), made.kernel(0, 1000, device=1)]
    found = part(export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": kernels}), "devices")
    assert [row.key for row in found.rows] == [("0",), ("1",)]
    assert values(found, "0")["other_ms"] == pytest.approx(0.0009)
    assert values(found, "1")["idle_ms"] == 0


def test_a_trace_without_length_has_no_shares(tmp_path: Path) -> None:
    found = part(export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(5, 5)]}), "devices")
    assert values(found, "0")["busy"] is None


# ---------------------------------------------------------------------------------------------------------
# Other shapes of an export


def test_range_names_are_found_as_text_as_string_id_and_without_types(tmp_path: Path) -> None:
    kernels = [made.kernel(0, 100)]
    text = [made.nvtx(0, 50, "decode"), made.nvtx(50, 90, "decode, seq = 4, op_id = 9")]
    ids = [{**made.nvtx(0, 50, None), "textId": 1}, {**made.nvtx(50, 90, "decode"), "textId": None}]
    only_ids = [{name: value for name, value in row.items() if name != "text"} for row in ids[:1] * 2]
    bare = [{name: row[name] for name in ("start", "end", "text")} for row in text]
    for number, (rows, total) in enumerate(((text, 90), (ids, 90), (only_ids, 100), (bare, 90))):
        path = tmp_path / f"{number}.sqlite"
        tables = {"CUPTI_ACTIVITY_KIND_KERNEL": kernels, "NVTX_EVENTS": rows}
        trace = trace_file.read(made.write(path, tables, ("gemm", "decode")))
        row = values(part(trace, "ranges"), "decode")
        assert (row["count"], row["total_ms"]) == (2, pytest.approx(total / 1e6))


def test_event_types_are_read_from_the_export_where_it_lists_them(tmp_path: Path) -> None:
    listed = [{"id": 159, "name": "NvtxPushPopRange"}, {"id": 60, "name": "NvtxStartEndRange"}]
    rows = [made.nvtx(0, 50, "decode", kind=159), made.nvtx(0, 80, "other", kind=59)]
    kernels = [made.kernel(0, 100)]
    tables = {"CUPTI_ACTIVITY_KIND_KERNEL": kernels, "NVTX_EVENTS": rows, "ENUM_NSYS_EVENT_TYPE": listed}
    assert [row.key for row in part(export(tmp_path, tables), "ranges").rows] == [("decode",)]


def test_a_range_carries_the_domain_of_its_own_process(tmp_path: Path) -> None:
    rows = [
        made.nvtx(0, None, "engine", kind=75, domain=1),
        made.nvtx(0, None, "load", kind=75, domain=1, pid=2),
        made.nvtx(0, 10, "step", domain=1),
        made.nvtx(0, 10, "step", domain=1, pid=2),
        made.nvtx(0, 10, "step"),
        made.nvtx(5, None, "mark", kind=34),
        made.nvtx(5, None, "never closed"),
    ]
    trace = export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, 100)], "NVTX_EVENTS": rows})
    assert {row.key[0] for row in part(trace, "ranges").rows} == {"engine/step", "load/step", "step"}
    assert trace.warnings == ("1 NVTX ranges were open when the trace ended; they are left out",)


def test_graph_rows_stand_beside_kernels_or_in_their_place(tmp_path: Path) -> None:
    tables: dict[str, made.Rows] = {
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [
            made.graph(1000, 3000, correlation=1),
            made.graph(4000, 6000, correlation=2),
            made.graph(0, 0, correlation=3),
        ],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            made.call(700, 900, correlation=1),
            made.call(3200, 3900, correlation=2),
        ],
    }
    trace = export(tmp_path, tables)
    assert values(part(trace, "devices"), "0")["busy_ms"] == pytest.approx(0.004)
    assert values(part(trace, "kernels"), "CUDA graph 3")["count"] == 2
    assert values(part(trace, "launches"), "graph", "idle")["p50_us"] == pytest.approx(0.55)
    assert "1 graph launches have no times" in trace.warnings[0]

    tables["CUPTI_ACTIVITY_KIND_KERNEL"] = [made.kernel(2900, 3500)]
    (tmp_path / "export.sqlite").unlink()
    both = export(tmp_path, tables)
    assert values(part(both, "devices"), "0")["busy_ms"] == pytest.approx(0.0045)


def test_a_call_with_many_kernels_has_one_latency(tmp_path: Path) -> None:
    """Under --cuda-graph-trace=node all kernels of a graph carry the correlation id of its launch."""
    kernels = [made.kernel(start, start + 10, correlation=1) for start in (300, 100, 200)]
    calls = [made.call(50, 60, correlation=1)]
    trace = export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": kernels, "CUPTI_ACTIVITY_KIND_RUNTIME": calls})
    row = values(part(trace, "launches"), "kernel", "any")
    assert (row["count"], row["p99_us"]) == (1, pytest.approx(0.05))


def test_correlation_ids_that_clash_between_processes_stay_apart(tmp_path: Path) -> None:
    kernels = [
        made.kernel(1000, 1100, correlation=1),
        made.kernel(5000, 5100, pid=2, device=1, correlation=1),
    ]
    calls = [made.call(4900, 4950, pid=2, correlation=1), made.call(900, 950, correlation=1)]
    waits = [made.synchronization(6000, 6500, pid=2, correlation=2)]
    calls += [made.call(6000, 6500, pid=2, correlation=2), made.call(6000, 6500, correlation=2)]
    ranges = [made.nvtx(5900, 6600, "mine", pid=2), made.nvtx(5900, 6600, "theirs")]
    trace = export(
        tmp_path,
        {
            "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
            "CUPTI_ACTIVITY_KIND_RUNTIME": calls,
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": waits,
            "NVTX_EVENTS": ranges,
        },
    )
    assert values(part(trace, "launches"), "kernel", "any")["p99_us"] == pytest.approx(0.1)
    assert [row.key for row in part(trace, "synchronizations").rows] == [("stream", "mine")]


def test_two_processes_that_call_their_own_gpu_device_0_have_two_devices(tmp_path: Path) -> None:
    kernels = [made.kernel(0, 1000), made.kernel(500, 1000, pid=2)]
    known = [{"gpuId": 4, "cudaId": 0, "pid": 1}, {"gpuId": 5, "cudaId": 0, "pid": 2}]
    told = export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": kernels, "TARGET_INFO_CUDA_DEVICE": known})
    assert [row.key for row in part(told, "devices").rows] == [("4",), ("5",)]
    assert told.warnings == ()

    (tmp_path / "export.sqlite").unlink()
    untold = export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    assert [row.key for row in part(untold, "devices").rows] == [("0",)]
    assert "several processes use a device 0" in untold.warnings[0]


def test_waits_are_found_by_the_names_of_calls_where_no_table_tells_of_them(tmp_path: Path) -> None:
    calls = [made.call(0, 10, name=1), made.call(20, 50, name=2), made.call(60, 70, name=0)]
    tables = {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, 100)], "CUPTI_ACTIVITY_KIND_RUNTIME": calls}
    strings = ("cudaLaunchKernel_v7000", "cudaStreamWaitEvent_v3020", "cudaEventSynchronize_v3020")
    found = part(export(tmp_path, tables, strings), "synchronizations")
    assert {row.key: row.values[0] for row in found.rows} == {
        ("event", "(no range)"): 1,
        ("stream waits for event", "(no range)"): 1,
    }


def test_copies_alone_make_a_trace(tmp_path: Path) -> None:
    copies = [
        made.copy(0, 100, source=0, size=4096),
        made.copy(100, 200, source=0, size=4097),
        made.copy(200, 300, kind=2, source=2, target=1, size=8),
        made.copy(300, 400, kind=8, source=2, target=2, size=2**30),
    ]
    trace = export(tmp_path, {"CUPTI_ACTIVITY_KIND_MEMCPY": copies})
    assert {row.key for row in part(trace, "copies").rows} == {
        ("HtoD", "pageable", "to 4 KiB"),
        ("HtoD", "pageable", "to 64 KiB"),
        ("DtoH", "pinned", "to 4 KiB"),
        ("DtoD", "device", "larger"),
    }
    assert values(part(trace, "devices"), "0")["copy_only_ms"] == pytest.approx(0.0004)
    assert part(trace, "kernels").rows == ()


def test_what_nsys_warns_of_is_passed_on(tmp_path: Path) -> None:
    said = [{"severity": 3, "text": "Not all events\nwere collected."}, {"severity": 1, "text": "Started."}]
    trace = export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, 1)], "DIAGNOSTIC_EVENT": said})
    assert trace.warnings == ("nsys: Not all events were collected.",)


# ---------------------------------------------------------------------------------------------------------
# Chrome traces


def complete(
    name: str, category: str, start: float, end: float, track: tuple[int, int], **args: object
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "pid": track[0],
        "tid": track[1],
        "args": args,
    }


def arrow(
    number: int, start: float, end: float, thread: tuple[int, int], stream: tuple[int, int]
) -> list[Any]:
    common = {"name": "launch", "cat": "launch", "id": number}
    return [
        {"ph": "s", **common, "ts": start, "pid": thread[0], "tid": thread[1]},
        {"ph": "f", "bp": "e", **common, "ts": end, "pid": stream[0], "tid": stream[1]},
    ]


THREAD, STREAM, COPIES_TRACK = (10, 1), (20, 1), (20, 2)
OURS = [
    {"ph": "M", "name": "process_name", "pid": 20, "tid": 0, "args": {"name": "emulated"}},
    complete("step", "phase", 1000.0, 1100.0, THREAD, step=7),
    complete("h2d", "phase", 1000.0, 1010.0, THREAD),
    complete("launch", "phase", 1010.0, 1030.0, THREAD),
    complete("wait.copy_done", "phase", 1030.0, 1090.0, THREAD),
    complete("h2d.input_ids", "device", 1006.0, 1008.0, STREAM, device=0, bytes=256, memory="pinned"),
    complete("decode.1.6", "device", 1020.0, 1060.0, STREAM, device=0),
    complete("d2h", "device", 1060.0, 1062.0, COPIES_TRACK, device=0, bytes=8, memory="pinned"),
    *arrow(1, 1005.0, 1006.0, THREAD, STREAM),
    *arrow(2, 1012.0, 1020.0, THREAD, STREAM),
    *arrow(3, 1062.0, 1089.0, COPIES_TRACK, THREAD),
]
TORCH = [
    complete("aten::mm", "cpu_op", 0.0, 30.0, (1, 1)),
    complete("cudaLaunchKernel", "cuda_runtime", 10.0, 15.0, (1, 1), correlation=5),
    complete("cudaMemcpyAsync", "cuda_runtime", 40.0, 45.0, (1, 1), correlation=6),
    complete("cudaStreamSynchronize", "cuda_runtime", 50.0, 70.0, (1, 1), correlation=7),
    complete("gemm", "kernel", 22.0, 32.0, (0, 7), correlation=5, device=0, stream=7, grid=[1, 1, 1]),
    complete(
        "Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 48.0, 68.0, (0, 7), correlation=6, device=0, bytes=4
    ),
    {"ph": "s", "id": 5, "pid": 1, "tid": 1, "ts": 10.0, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 5, "pid": 0, "tid": 7, "ts": 22.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    {
        "ph": "X",
        "cat": "Trace",
        "name": "PyTorch Profiler (0)",
        "pid": "Spans",
        "tid": "PyTorch",
        "ts": 0,
        "dur": 80,
    },
]


def written(path: Path, content: object) -> Path:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_our_timeline_is_read_in_every_form(tmp_path: Path, name: str, wrapped: bool) -> None:
    trace = trace_file.read(written(tmp_path / name, {"traceEvents": OURS} if wrapped else OURS))
    assert values(part(trace, "ranges"), "launch")["total_ms"] == pytest.approx(0.02)
    assert [row.key for row in part(trace, "synchronizations").rows] == [("copy_done", "step")]
    assert {row.key for row in part(trace, "copies").rows} == {
        ("HtoD", "pinned", "to 4 KiB"),
        ("DtoH", "pinned", "to 4 KiB"),
    }
    assert [row.key for row in part(trace, "kernels").rows] == [("decode.1.6",)]
    assert values(part(trace, "launches"), "program", "idle")["p50_us"] == pytest.approx(8)
    row = values(part(trace, "devices"), "0")
    assert row["busy_ms"] == pytest.approx(0.04)
    assert row["copy_only_ms"] == pytest.approx(0.004)
    assert row["host_wait_ms"] == pytest.approx(0.004)
    assert row["launch_wait_ms"] == pytest.approx(0.008)


def test_a_trace_of_torch_profiler_is_read(tmp_path: Path) -> None:
    trace = trace_file.read(written(tmp_path / "trace.json", {"schemaVersion": 1, "traceEvents": TORCH}))
    assert trace.format == "Chrome trace of torch.profiler"
    assert [row.key for row in part(trace, "ranges").rows] == [("aten::mm",)]
    assert [row.key for row in part(trace, "copies").rows] == [("DtoH", "pageable", "to 4 KiB")]
    assert [row.key for row in part(trace, "synchronizations").rows] == [("stream", "(no range)")]
    assert values(part(trace, "launches"), "kernel", "idle")["p50_us"] == pytest.approx(12)
    row = values(part(trace, "devices"), "0")
    assert (row["host_wait_ms"], row["launch_wait_ms"]) == (pytest.approx(0.008), pytest.approx(0.008))


def test_waits_that_torch_profiler_recorded_are_taken_from_its_rows(tmp_path: Path) -> None:
    wait = complete("Stream Sync", "cuda_sync", 52.0, 69.0, (0, 7), correlation=7, device=0, stream=7)
    around = complete("step", "user_annotation", 35.0, 75.0, (1, 1))
    trace = trace_file.read(written(tmp_path / "trace.json", [*TORCH, wait, around]))
    row = values(part(trace, "synchronizations"), "stream", "step")
    assert (row["count"], row["total_ms"]) == (1, pytest.approx(0.017))


def test_times_since_the_epoch_keep_their_microseconds(tmp_path: Path) -> None:
    shifted = [{**each, "ts": each["ts"] + 1.7e15} for each in OURS if "ts" in each]  # type: ignore[operator]
    trace = trace_file.read(written(tmp_path / "trace.json", shifted))
    assert values(part(trace, "devices"), "0")["busy_ms"] == pytest.approx(0.04)


# ---------------------------------------------------------------------------------------------------------
# Intervals

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(spans: list[tuple[int, int]]) -> tuple[events.Times, events.Times]:
    start = np.array([begin for begin, _ in spans], np.int64)
    return start, start + np.array([length for _, length in spans], np.int64)


def inside(spans: list[tuple[int, int]]) -> set[int]:
    return {time for begin, length in spans for time in range(begin, begin + length)}


@given(SPANS, SPANS)
def test_unions_cover_what_their_intervals_cover(
    spans: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    starts, ends = intervals.union(*arrays(spans))
    assert (starts[1:] > ends[:-1]).all()
    assert inside(list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))) == inside(spans)
    assert intervals.length(*arrays(spans)) == len(inside(spans))
    low, high = arrays(windows)
    expected = [len(inside([window]) & inside(spans)) for window in windows]
    assert intervals.covered(starts, ends, low, high).tolist() == expected


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges that a thread pushed and popped, in the order in which it did."""
    found: list[tuple[int, int]] = []
    open_since: list[int] = []
    now = 0
    for _ in range(draw(st.integers(0, 20))):
        now += draw(st.integers(0, 3))
        if open_since and draw(st.booleans()):
            found.append((open_since.pop(), now))
        else:
            open_since.append(now)
    return found + [(start, now) for start in reversed(open_since)]


@given(nested(), st.lists(st.integers(0, 70), max_size=8))
@settings(max_examples=300)
def test_the_innermost_range_is_the_shortest_that_holds_a_time(
    spans: list[tuple[int, int]], times: list[int]
) -> None:
    starts = np.array([start for start, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    found = intervals.innermost(starts, ends, np.array(times, np.int64))
    for time, row in zip(times, found.tolist(), strict=True):
        holding = [end - start for start, end in spans if start <= time < end]
        assert (row == events.NONE) == (not holding)
        if holding:
            assert starts[row] <= time < ends[row]
            assert ends[row] - starts[row] == min(holding)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=30))
def test_groups_have_numpys_percentiles(rows: list[tuple[int, int]]) -> None:
    keys, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    for group in analysis.grouped(keys, lengths, (50, 95, 99)):
        mine = lengths[keys == group.key]
        assert (group.count, group.total) == (len(mine), mine.sum())
        assert group.percentiles == pytest.approx(np.percentile(mine, (50, 95, 99)).tolist())


# ---------------------------------------------------------------------------------------------------------
# Before and after


def two(folder: Path) -> dict[str, Any]:
    after = {name: [dict(row) for row in rows] for name, rows in SPLIT.items()}
    after["CUPTI_ACTIVITY_KIND_MEMCPY"] = [made.copy(9500, 10000, source=0, correlation=4)]
    after["CUPTI_ACTIVITY_KIND_KERNEL"][1]["end"] = 6500
    found = []
    for name, tables in (("before", SPLIT), ("after", after)):
        trace = trace_file.read(made.write(folder / f"{name}.sqlite", tables, ("gemm",)))
        found.append((trace, analysis.analyse(trace)))
    return report.result(found[0], found[1])


def test_two_traces_are_set_against_each_other(tmp_path: Path) -> None:
    result = two(tmp_path)
    (device,) = result["parts"]["devices"]["rows"]
    assert device["values"]["busy_ms"] == {
        "unit": "ms",
        "before": pytest.approx(0.0035),
        "after": pytest.approx(0.004),
        "change": pytest.approx(1 / 7),
    }
    copies = {tuple(row["key"]): row["values"]["count"] for row in result["parts"]["copies"]["rows"]}
    gone, new = copies["HtoD", "pinned", "to 4 KiB"], copies["HtoD", "pageable", "to 4 KiB"]
    assert (gone["before"], gone["after"], gone["change"]) == (1, 0, -1)
    assert (new["before"], new["after"], new["change"]) == (0, 1, None)
    assert any("no interval and no verdict" in line for line in result["warnings"])


def test_traces_of_different_length_are_warned_of(tmp_path: Path) -> None:
    sides = []
    for name, end in (("before", 1000), ("after", 1100)):
        tables = {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, end)]}
        trace = trace_file.read(made.write(tmp_path / f"{name}.sqlite", tables, ("gemm",)))
        sides.append((trace, analysis.analyse(trace)))
    said = "the traces are of different length"
    assert any(said in line for line in report.result(*sides)["warnings"])
    assert not any(said in line for line in report.result(sides[0], sides[0])["warnings"])


def test_each_value_is_a_line_of_csv(tmp_path: Path) -> None:
    result = two(tmp_path)
    lines = list(csv.DictReader(io.StringIO(report.to_csv(result))))
    cells = [value for found in result["parts"].values() for row in found["rows"] for value in row["values"]]
    assert len(lines) == len(cells)
    (busy,) = [line for line in lines if line["measure"] == "busy_ms"]
    assert (busy["part"], busy["key"], float(busy["before"])) == ("devices", "0", 0.0035)


def test_markdown_has_a_table_for_each_part_with_rows(tmp_path: Path) -> None:
    text = markdown_page(report.page(two(tmp_path)))
    assert "| device |  | before | after | change |" in text
    assert "| 0 | window_ms |" in text
    assert "### Ranges\n\nNone in the trace.\n" in text


# ---------------------------------------------------------------------------------------------------------
# What is refused


def refused(path: Path) -> str:
    with pytest.raises(BadSetting) as error:
        trace_file.read(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.sqlite")
    assert "Is a directory" in refused(tmp_path)
    (tmp_path / "empty.sqlite").touch()
    assert refused(tmp_path / "empty.sqlite").endswith("empty.sqlite is empty")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("kernel 1: 3 us\n")
    assert "neither an SQLite export of nsys" in refused(path)


def test_a_report_of_nsys_is_refused_with_the_command_that_exports_it(tmp_path: Path) -> None:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"\x00\x01NSIGHT" * 10)
    assert refused(path).endswith("nsys export --type sqlite --output run.sqlite run.nsys-rep")


def test_an_export_without_gpu_rows_and_ranges_is_refused(tmp_path: Path) -> None:
    assert "has no GPU rows" in refused(made.write(tmp_path / "empty.sqlite", {}))
    domain = made.nvtx(0, 10, "engine") | {"end": None, "eventType": 75}
    assert "has no GPU rows" in refused(made.write(tmp_path / "host.sqlite", {"NVTX_EVENTS": [domain]}))


def test_a_database_that_is_no_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE people (name)")
    assert "no export of nsys" in refused(path)


@pytest.mark.parametrize("share", [0.5, 0.999])
def test_an_export_that_was_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    kernels = [made.kernel(at, at + 5) for at in range(0, 20000, 10)]
    whole = made.write(tmp_path / "whole.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": kernels}).read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "is cut short" in refused(path)
    path.write_bytes(whole[:40])
    assert "is cut short" in refused(path)


def test_a_damaged_export_is_refused(tmp_path: Path) -> None:
    kernels = [made.kernel(at, at + 5) for at in range(0, 20000, 10)]
    path = made.write(tmp_path / "damaged.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    path.write_bytes(content)
    assert "it is damaged" in refused(path)


def test_json_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": OURS})
    for name, content in (
        ("a.json", text[:-20].encode()),
        ("b.json.gz", gzip.compress(text.encode())[:-20]),
        ("c.json.gz", gzip.compress(text[:-20].encode())),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert "is cut short" in refused(path)


def test_json_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    assert "no Chrome trace" in refused(written(tmp_path / "a.json", {"events": []}))
    assert "no Chrome trace" in refused(written(tmp_path / "b.json", [1, 2]))
    (tmp_path / "c.json").write_text("{not json}")
    assert "is no JSON" in refused(tmp_path / "c.json")


def test_a_trace_of_the_host_alone_is_refused(tmp_path: Path) -> None:
    """What torch.profiler writes where there is no GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(4) @ torch.ones(4)
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    assert "has no GPU rows" in refused(path)


# ---------------------------------------------------------------------------------------------------------
# The command


def trace_command(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return bench_command.start(bench_command.installed(folder), folder, "trace", *arguments).end()


def test_the_command_prints_before_and_after_as_json(tmp_path: Path) -> None:
    two(tmp_path)
    code, stdout, stderr = trace_command(tmp_path, "before.sqlite", "after.sqlite", "--format", "json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert {"schema_version", "before", "after", "parts", "warnings"} == set(result)
    assert result["after"]["rows"]["work"] == 5


def test_the_command_prints_tables_that_fit_a_pipe(tmp_path: Path) -> None:
    made.write(tmp_path / "one.sqlite", SPLIT, ("a_very_long_kernel_name" * 10,))
    code, stdout, stderr = trace_command(tmp_path, "one.sqlite")
    assert (code, stderr) == (0, "")
    assert max(map(len, stdout.splitlines())) <= 120
    for title in ("Devices", "Ranges", "Synchronizations", "Copies", "Kernels", "Launch to execution"):
        assert title in stdout


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    code, stdout, stderr = trace_command(tmp_path, "none.sqlite")
    assert (code, stdout) == (2, "")
    assert stderr == "bench: cannot read the trace none.sqlite: No such file or directory\n"
