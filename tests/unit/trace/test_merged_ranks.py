"""Several ranks in one file, with the same ids: each kernel is of its own rank's call, or of none."""

from pathlib import Path
from typing import Any

import pytest

from overlap_bench.harness.trace import gaps, trace_file
from overlap_bench.harness.trace.events import Trace
from tests.support import nsys_export as made
from tests.support.traces import launched, part, values, written

Events = list[dict[str, Any]]
EARLY, LATE, BESIDE = 1000.0, 6000.0, 1005.0  # us at which a rank begins
SPLIT = ("host_wait_ms", "sync_wait_ms", "launch_wait_ms", "other_ms")


def rank(start: float, **where: Any) -> Events:
    return [event for n in range(20) for event in launched(start + 200 * n, n + 1, **where)]


def at(events: Events) -> Events:
    return sorted(events, key=lambda each: float(each["ts"]))


def read(folder: Path, events: Events) -> Trace:
    return trace_file.read(written(folder / "trace.json", events))


def latencies(trace: Trace) -> tuple[float | None, ...] | None:
    """Count and percentiles; None where there are none."""
    rows = [row for row in part(trace, "launches").rows if row.key == ("kernel", "any")]
    return rows[0].values if rows else None


def named(kind: str, name: str, pid: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"process_{kind}", "pid": pid, "tid": 0, "args": {kind: name}}


FIRST, SECOND = {"host": 4001}, {"host": 4002, "gpu": 1, "device": 1}
FILES: dict[str, Events] = {
    "with the rank in the pid": at(
        [
            *rank(EARLY, host="[TP00] 4001", gpu="[TP00] 0"),
            *rank(BESIDE, host="[TP01] 4001", gpu="[TP01] 0"),
        ]
    ),
    "with the rank in args": at([*rank(EARLY, rank=0), *rank(BESIDE, rank=1)]),
    "with the rank in names": [
        *at([*rank(EARLY, host=4001, gpu=10), *rank(BESIDE, host=4002, gpu=11)]),
        *(named("name", f"rank {n}", pid) for n, pids in enumerate(((4001, 10), (4002, 11))) for pid in pids),
        named("labels", "GPU 0", 10),
        named("name", "rank 0", 10),
    ],
}


@pytest.mark.parametrize("events", FILES.values(), ids=FILES)
def test_a_kernel_is_of_its_own_ranks_call(tmp_path: Path, events: Events) -> None:
    trace = read(tmp_path, events)
    assert latencies(trace) == (40, pytest.approx(30), pytest.approx(30), pytest.approx(30))
    assert not trace.untold
    assert not any("cannot be told" in line for line in trace.warnings)


def test_devices_of_ranks_that_have_one_number_are_two(tmp_path: Path) -> None:
    for case, names in (
        ("with the rank in args", {"0 (rank 0)", "0 (rank 1)"}),
        ("with the rank in names", {"0 (GPU 0 rank 0)", "0 (rank 1)"}),
        ("with the rank in the pid", {"0 ([TP00] 0)", "0 ([TP01] 0)"}),
    ):
        trace = read(tmp_path, FILES[case])
        assert set(trace.devices) == names
        assert [row.values[1] for row in part(trace, "devices").rows] == pytest.approx([1, 1])
        assert "several processes have a device 0; each is taken for a GPU of its own" in trace.warnings


UNTOLD: dict[str, Events] = {
    "behind each other": [*rank(EARLY, **FIRST), *rank(BESIDE, **SECOND)],
    "by time": at([*rank(EARLY, **FIRST), *rank(LATE, **SECOND)]),
    "beside each other by time": at([*rank(EARLY, **FIRST), *rank(BESIDE, **SECOND)]),
    "of one pid": at([*rank(EARLY), *rank(BESIDE, gpu=1, device=1)]),
    "on one device": [*rank(EARLY, **FIRST), *rank(BESIDE, host=4002)],
    "a device whose calls are not there": [
        *rank(EARLY, **FIRST),
        *(each for each in rank(LATE, **SECOND) if each["cat"] == "kernel"),
    ],
}


@pytest.mark.parametrize("events", UNTOLD.values(), ids=UNTOLD)
def test_where_it_cannot_be_told_there_is_a_warning_and_no_latency(tmp_path: Path, events: Events) -> None:
    trace = read(tmp_path, events)
    assert latencies(trace) is None
    for row in part(trace, "devices").rows:
        found = values(part(trace, "devices"), *row.key)
        assert found["busy_ms"] is not None
        assert [found[name] for name in SPLIT] == [None] * 4
    assert any("cannot be told, for several calls have their ids" in line for line in trace.warnings)
    assert {gap.host for gap in gaps.gaps(trace)} == {gaps.UNTOLD}


def test_a_call_within_another_of_its_id_is_no_second_one(tmp_path: Path) -> None:
    """The driver's call is within the runtime's, on one thread and under one id."""
    inner = [
        {**each, "name": "cuLaunchKernel", "cat": "cuda_driver", "ts": each["ts"] + 2, "dur": 5.0}
        for each in rank(EARLY)
        if each["cat"] == "cuda_runtime"
    ]
    trace = read(tmp_path, [*inner, *rank(EARLY)])
    assert latencies(trace) == (20, pytest.approx(30), pytest.approx(30), pytest.approx(30))
    assert trace.warnings == ()


def test_work_before_its_call_is_no_pair(tmp_path: Path) -> None:
    """Clocks of host and device that differ, or an id that is another's."""
    events = rank(EARLY)
    events[1]["ts"] = EARLY - 50
    trace = read(tmp_path, events)
    assert latencies(trace) == (19, pytest.approx(30), pytest.approx(30), pytest.approx(30))
    (warning,) = trace.warnings
    assert warning.startswith("1 of 20 pieces of work of device 0 would begin before the call")


# ---------------------------------------------------------------------------------------------------------
# Exports of nsys


def exported(folder: Path, *ranks: dict[str, Any], without: tuple[str, ...] = ()) -> Trace:
    """A call each 100 us, a kernel 20 us later and a wait within the call; ids count from 1 in each rank."""
    tables: dict[str, list[dict[str, object]]] = {}
    for each in ranks:
        process = each.get("machine", 1) << 48 | each.get("pid", 1) << 24
        for n in range(10):
            start = each["start"] + 100_000 * n
            ids = {"correlation": n + 1}
            for table, row in (
                ("KERNEL", made.kernel(start + 20_000, start + 70_000, device=each.get("device", 0), **ids)),
                ("RUNTIME", made.call(start, start + 5000, **ids)),
                ("SYNCHRONIZATION", made.synchronization(start + 1000, start + 4000, **ids)),
            ):
                place = "globalTid" if table == "RUNTIME" else "globalPid"
                row[place] = process | (5 if table == "RUNTIME" else 0)
                tables.setdefault(made.PREFIX + table, []).append(
                    {name: value for name, value in row.items() if name not in without}
                )
    (folder / "export.sqlite").unlink(missing_ok=True)
    return trace_file.read(made.write(folder / "export.sqlite", tables, ("cudaLaunchKernel",)))


def test_two_machines_with_one_pid_and_device_are_two(tmp_path: Path) -> None:
    trace = exported(tmp_path, {"start": 1_000_000}, {"start": 1_002_000, "machine": 2})
    assert trace.devices == ("0 (machine 1)", "0 (machine 2)")
    assert latencies(trace) == (20, pytest.approx(20), pytest.approx(20), pytest.approx(20))
    assert trace.warnings == ()


@pytest.mark.parametrize("without", [(), ("globalPid",), ("globalPid", "globalTid")])
def test_processes_of_an_export_that_cannot_be_told_apart(tmp_path: Path, without: tuple[str, ...]) -> None:
    later = {"start": 1_002_000, "device": 1, "pid": 2 if without else 1}
    trace = exported(tmp_path, later, {"start": 1_000_000}, without=without)
    assert latencies(trace) is None
    assert trace.untold == {0, 1}
    assert "cannot be told" in trace.warnings[0]
