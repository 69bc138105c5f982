"""Chrome traces, ours and torch.profiler's: what is read of them, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.harness.trace import analysis, chrome_events, trace_file
from tests.support.traces import complete, part, refused, values, written


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
    assert [row.key for row in part(trace, "kernels").rows] == [("0", "decode.1.6")]
    assert values(part(trace, "launches"), "program", "idle")["p50_us"] == pytest.approx(8)
    row = values(part(trace, "devices"), "0")
    assert row["busy_ms"] == pytest.approx(0.04)
    assert row["copy_only_ms"] == pytest.approx(0.004)
    assert row["host_wait_ms"] == pytest.approx(0.004)
    assert row["launch_wait_ms"] == pytest.approx(0.008)


def test_a_launch_whose_phase_began_before_the_device_was_idle_and_goes_on_is_waited_for(
    tmp_path: Path,
) -> None:
    """An arrow tells only where its launch began; the phase around it, how long the thread was at it."""

    def split(phase_end: float) -> tuple[float | None, float | None]:
        events = [
            complete("step", "phase", 990.0, 1100.0, THREAD),
            complete("launch", "phase", 1000.0, phase_end, THREAD),
            complete("h2d", "device", 1002.0, 1010.0, STREAM, device=0),
            complete("decode", "device", 1030.0, 1060.0, STREAM, device=0),
            *arrow(1, 1000.0, 1030.0, THREAD, STREAM),
        ]
        trace = trace_file.read(written(tmp_path / "trace.json", events))
        row = values(part(trace, "devices"), "0")
        assert values(part(trace, "launches"), "program", "any")["p50_us"] == pytest.approx(30)
        return row["launch_wait_ms"], row["other_ms"]

    assert split(phase_end=1025.0) == (pytest.approx(0.02), 0)
    assert split(phase_end=1005.0) == (0, pytest.approx(0.02))


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
# What is refused


def test_json_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    assert "not a Chrome trace" in refused(written(tmp_path / "a.json", {"events": []}))
    assert "no Chrome trace: none of its 1 entries is an event, the first: 1, 2]" in refused(
        written(tmp_path / "b.json", [1, 2])
    )
    (tmp_path / "c.json").write_text("{not json}")
    assert "is not JSON" in refused(tmp_path / "c.json")
    (tmp_path / "d.json").write_text('{"traceEvents": [{"ph": "X", "cat"')
    assert "is cut short, and what there is of it has no GPU rows" in refused(tmp_path / "d.json")


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
# Files that are larger than what is read at a time


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_is_read_in_pieces_as_it_is_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, wrapped: bool
) -> None:
    tricky = complete("}, {", "cpu_op", 1.0, 2.0, THREAD, frames=[{"at": 1}, {"at": 2}], text='"}, {"')
    found = [*OURS, *TORCH, tricky]
    head = {"properties": [{"id": 0}, {"id": 1}], "note": '"traceEvents": ['}
    content = {**head, "traceEvents": found, "tail": [{"a": 1}, {"a": 2}]} if wrapped else found
    path = written(tmp_path / name, content)
    whole = analysis.analyse(trace_file.read(path))
    for size in (7, 150, 1000):
        monkeypatch.setattr(chrome_events, "CHUNK", size)
        batches = list(chrome_events.batches(path))
        assert sum(len(each.events) for each in batches) == len(found)
        assert len(batches) > 2
        assert not any(each.odd or each.cut for each in batches)
        assert analysis.analyse(trace_file.read(path)) == whole


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chrome_events, "NEVER_TOO_LARGE", 1 << 20)
    text = json.dumps(OURS[:-1]).encode()
    for name, content in (("a", text[:-1] + b" " * (9 << 20) + b"]"), ("b", b"[" + text[1:-1] * 5000)):
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(gzip.compress(content))
        assert "unpacks to more than 100 times its size" in refused(path)


def test_text_without_an_event_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chrome_events, "CHUNK", 100)
    monkeypatch.setattr(chrome_events, "LARGEST", 1000)
    path = written(tmp_path / "a.json", {"traceEvents": [{"name": "x" * 5000}]})
    assert "of it without an event" in refused(path)
