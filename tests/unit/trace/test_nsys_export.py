"""Exports of Nsight Systems, real ones among them: what is said of each against plain SQL."""

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_bench.harness.trace import analysis, gaps, trace_file
from overlap_bench.harness.trace.analysis import Part
from overlap_bench.harness.trace.events import Trace
from tests.support import nsys_export as made
from tests.support.places import FIXTURES
from tests.support.traces import part, values

NS = 1e-9


def sums(found: Part) -> dict[tuple[str, ...], tuple[int, int]]:
    """Count and total ns of each row."""
    return {
        row.key: (int(row.values[0] or 0), round(1e6 * (values(found, *row.key)["total_ms"] or 0)))
        for row in found.rows
    }


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
    SELECT deviceId, value, count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL
    JOIN StringIds ON StringIds.id = demangledName GROUP BY deviceId, demangledName
"""
BY_CALL = """
    SELECT value, count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_RUNTIME
    JOIN StringIds ON StringIds.id = nameId GROUP BY nameId
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


HOST = FIXTURES / "nsys" / "host_2022.sqlite"
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
    assert (gaps.steps(trace), gaps.gaps(trace)) == (24, [])
    assert {each.name: len(each.rows) for each in analysis.analyse(trace) if each.name != "ranges"} == {
        "devices": 0,
        "synchronizations": 0,
        "calls": 0,
        "copies": 0,
        "kernels": 0,
        "launches": 0,
    }


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


@pytest.mark.parametrize(
    ("name", "sql", "keys"),
    [
        ("ranges", RANGES, 1),
        ("synchronizations", SYNCHRONIZATIONS, 2),
        ("kernels", BY_KERNEL, 2),
        ("calls", BY_CALL, 1),
    ],
)
def test_counts_and_times_of_an_export_are_what_sql_says(
    checked: Checked, name: str, sql: str, keys: int
) -> None:
    asked = {tuple(map(str, row[:keys])): row[keys:] for row in ask(checked.path, sql)}
    assert sums(part(checked.trace, name)) == asked


def test_copies_of_an_export_are_what_sql_says(checked: Checked) -> None:
    found = part(checked.trace, "copies")
    asked = {row[:3]: row[3:] for row in ask(checked.path, COPIES)}
    assert sums(found) == {key: (count, total) for key, (count, _, total) in asked.items()}
    for key, (_, amount, _) in asked.items():
        assert values(found, *key)["MiB"] == amount / 2**20
    assert {key[1] for key in asked if key[0] == "HtoD"} == {"pageable", "pinned"}


def test_latencies_of_an_export_are_what_sql_says(checked: Checked) -> None:
    row = values(part(checked.trace, "launches"), "kernel", "any")
    asked = np.array(ask(checked.path, LATENCIES)).ravel() / 1e3
    assert row["count"] == len(asked)
    wanted = np.percentile(asked, (50, 95, 99))
    assert [row["p50_us"], row["p95_us"], row["p99_us"]] == pytest.approx(wanted.tolist(), rel=NS)
