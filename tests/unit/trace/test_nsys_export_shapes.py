"""Exports of other shapes: columns, tables and ids that differ from version to version, and broken files."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from overlap_bench.harness.trace import trace_file
from tests.support import nsys_export as made
from tests.support.traces import export, part, refused, values


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
    assert trace.warnings == (
        "left out: 1 range that did not end in the trace (no end, or one before the start)",
    )


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
    assert values(part(trace, "kernels"), "0", "CUDA graph 3")["count"] == 2
    assert values(part(trace, "launches"), "graph", "idle")["p50_us"] == pytest.approx(0.55)
    assert trace.warnings[0].startswith("left out: 1 graph launch whose time was not taken")
    assert trace.warnings[0].endswith("the devices were busier than shown")

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
# What is refused


def test_an_export_without_gpu_rows_and_ranges_is_refused(tmp_path: Path) -> None:
    assert "has no GPU rows" in refused(made.write(tmp_path / "empty.sqlite", {}))
    domain, unknown = made.nvtx(0, None, "engine", kind=75), made.nvtx(0, 10, "step", kind=4711)
    assert "has no GPU rows" in refused(
        made.write(tmp_path / "host.sqlite", {"NVTX_EVENTS": [domain, unknown]})
    )


def test_an_export_whose_only_row_has_no_time_is_refused(tmp_path: Path) -> None:
    alone = {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, 5) | {"start": None}]}
    said = refused(made.write(tmp_path / "alone.sqlite", alone))
    assert "has no rows with times; left out: 1 kernel whose time was not taken" in said


def test_a_database_that_is_no_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE people (name)")
    assert "not an export of nsys" in refused(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[: len(content) // 2], "is cut short"),
        (lambda content: content[:-100], "is cut short"),
        (lambda content: content[:40], "is cut short"),
        (lambda content: content[:8192] + b"\xff" * (len(content) - 8192), "it is damaged"),
    ],
)
def test_an_export_that_was_cut_short_or_damaged_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    kernels = [made.kernel(at, at + 5) for at in range(0, 20000, 10)]
    path = made.write(tmp_path / "odd.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": kernels})
    path.write_bytes(change(path.read_bytes()))
    assert said in refused(path)
