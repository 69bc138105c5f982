"""The ten lines that two traces of two devices begin with, and the gaps in them."""

import json
from pathlib import Path

import pytest

from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.report import formats, trace_tables
from overlap_bench.harness.trace import analysis, trace_file
from overlap_bench.harness.trace.gaps import Gap, gaps, steps
from overlap_bench.harness.trace.result import Brief, TraceResult, result

COLLECTIVE = "ncclDevKernel_AllReduce"


def training(path: Path, steps: int, collective_us: tuple[float, float], memset_us: float = 0.0) -> Path:
    """What torch.profiler writes of two devices that compute 100 us a step and then wait for each other. In
    the second step the host of device 1 takes `memset_us` for a memset."""
    found: list[dict[str, object]] = []

    def add(name: str, category: str, start: float, took: float, pid: int, **args: object) -> None:
        what = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": took, "pid": pid, "tid": 1}
        found.append({**what, "args": args})

    for device in (0, 1):
        host, now = 10 + device, 1000.0
        for number in range(steps):
            begun = now
            if device and memset_us and number == 1:
                now = _launch(add, "Memset (Device)", "gpu_memset", now, 1.0, device, memset_us)
                add("aten::zero_", "cpu_op", begun, memset_us + 1, host)
            for kernel, took in (("gemm", 100.0), (COLLECTIVE, collective_us[device])):
                now = _launch(add, kernel, "kernel", now, took, device, 5.0)
            add(f"ProfilerStep#{number}", "user_annotation", begun - 1, now - begun, host)
    path.write_text(json.dumps({"traceEvents": found}))
    return path


def _launch(add, name: str, category: str, now: float, took: float, device: int, call_us: float) -> float:
    """The time when the device is through with it."""
    number = int(now * 1000) * 2 + device
    call = "cudaMemsetAsync" if category == "gpu_memset" else "cudaLaunchKernel"
    add(call, "cuda_runtime", now, call_us, 10 + device, correlation=number)
    add(name, category, now + call_us, took, device, correlation=number, device=device)
    return now + call_us + took


def compared(folder: Path, of_profile: bool = False) -> TraceResult:
    sides = (
        training(folder / "before.json", 34, (17_000.0, 8_000.0)),
        training(folder / "after.json", 30, (10_000.0, 24_000.0), memset_us=5_700.0),
    )
    read = [trace_file.read(path) for path in sides]
    before, after = ((trace, analysis.analyse(trace)) for trace in read)
    return result(before, after, of_profile)


def test_two_traces_lead_with_what_changed_most_per_step(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert [row.key for row in found.parts["kernels"].rows[:2]] == [["1", COLLECTIVE], ["0", COLLECTIVE]]
    assert found.parts["calls"].rows[0].key == ["cudaMemsetAsync"]
    numbered = found.parts["ranges"].rows[0]
    assert (numbered.key, numbered.values["count"].before) == (["ProfilerStep#N"], 68)
    assert any("34 steps before and 30 after" in line for line in found.warnings)
    (table,) = trace_tables.page(Brief(found)).tables
    assert table.title == "What changed most, us per step, of 34 and 30 steps"
    assert len(table.rows) <= 10
    lines = {row[:2]: row[2:] for row in table.rows}
    assert lines[COLLECTIVE, "0"] == ("17,000", "10,000", "−7,000, −41.2%")
    assert lines[COLLECTIVE, "1"] == ("8,000", "24,000", "+16,000, +200.0%")
    assert lines["cudaMemsetAsync", ""] == ("0", "190", "+190")


def test_a_profile_begins_with_the_phases_of_its_steps_too_and_other_traces_do_not(tmp_path: Path) -> None:
    def first(of_profile: bool) -> set[str]:
        (table,) = trace_tables.page(Brief(compared(tmp_path, of_profile))).tables
        return {row[0] for row in table.rows}

    ranges = {"ProfilerStep#N", "aten::zero_"}
    assert first(of_profile=True) >= ranges
    assert not first(of_profile=False) & ranges


def test_the_longest_gap_says_what_the_host_did_in_it(tmp_path: Path) -> None:
    trace = trace_file.read(training(tmp_path / "one.json", 3, (50.0, 50.0), memset_us=5_700.0))
    assert steps(trace) == 3
    longest = next(gap for gap in gaps(trace) if gap.device == "1")
    host = "cudaMemsetAsync (5,700 us) in aten::zero_"
    assert longest == Gap(device="1", at_ms=0.161, length_us=5700.0, host=host)
    assert {gap.host for gap in gaps(trace) if gap.device == "0"} == {
        f"cudaLaunchKernel (5 us) in ProfilerStep#{number}" for number in range(3)
    }


def test_traces_of_equal_work_have_no_warning_of_it(tmp_path: Path) -> None:
    same = training(tmp_path / "same.json", 4, (5.0, 5.0))
    side = trace_file.read(same), analysis.analyse(trace_file.read(same))
    assert not any("unequal work" in line for line in result(side, side).warnings)


def test_the_arms_of_a_profile_stand_beside_each_other_and_are_not_compared(tmp_path: Path) -> None:
    found, other = compared(tmp_path, of_profile=True), compared(tmp_path)
    page = trace_tables.page(found)
    assert page.tables[0].title == "What takes most, us per step, of 34 and 30 steps"
    assert page.tables[0].rows[0][2:] == ("8,100", "24,100")  # device 1 was busy
    assert not any("change" in table.columns for table in page.tables)
    values = [value for part in found.parts.values() for row in part.rows for value in row.values.values()]
    assert {value.change for value in values} == {None}
    assert [row.key for row in found.parts["kernels"].rows[:1]] == [["1", COLLECTIVE]]
    assert not any("change" in line or "different length" in line for line in page.warnings)
    assert to_plain(found).keys() == to_plain(other).keys()
    assert "−" not in formats.to_markdown(found)


def marked(folder: Path, *names: str) -> int | None:
    """How many steps a trace has in whose ten iterations these ranges lie, one in the other."""
    events: list[dict[str, object]] = []
    for number in range(10):
        for depth, name in enumerate(names):
            at, named = 100 * number + depth, name.replace("N", str(number))
            events.append({"cat": "user_annotation", "name": named, "pid": 1, "ts": at, "dur": 50 - depth})
        events.append({"cat": "kernel", "name": "k", "pid": 0, "ts": 100 * number, "dur": 9})
    path = folder / "marked.json"
    path.write_text(json.dumps([{"ph": "X", "tid": 1, **each} for each in events]))
    return steps(trace_file.read(path))


@pytest.mark.parametrize(
    "names", [("iteration N", "step"), ("iteration N", "step N"), ("step",), ("Iter: N",)]
)
def test_a_range_within_a_step_is_no_step_of_its_own(tmp_path: Path, names: tuple[str, ...]) -> None:
    """An optimizer's `step` in a training loop's `iteration 3`."""
    assert marked(tmp_path, *names) == 10
