"""What is read of the machine before and after a round."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from overlap_bench.harness.common import core_speed
from overlap_bench.harness.run import records
from tests.support.bench_command import wait_until

ALLOWED = os.sched_getaffinity(0)  # before any test here takes a reading


def test_cpu_time_is_that_of_every_thread_to_the_nanosecond() -> None:
    before = time.process_time_ns()
    found = records.cpu_ns(os.getpid())
    assert before <= found <= time.process_time_ns()


def test_a_process_that_is_gone_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    values = records.read_counters({"self": os.getpid(), "gone": child.pid})
    assert {name for name in values if "." in name} == {
        "cpu_ms.self",
        "switches_voluntary.self",
        "switches_forced.self",
    }
    with pytest.raises(OSError, match="Invalid argument"):
        records.cpu_ns(child.pid)


def test_a_round_gets_the_differences() -> None:
    start = records.read_counters({"self": os.getpid()})
    sum(range(200_000))
    row = records.counters_between(start, records.read_counters({"self": os.getpid()}))
    assert row["cpu_ms.self"] > 0
    assert row["switches_voluntary.self"] >= 0
    assert row["load_1m"] >= 0


def test_a_round_gets_the_shares_of_the_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict.fromkeys(("nice", "system", "idle", "iowait", "irq", "softirq"), 1.0)
    read = iter([SimpleNamespace(user=0, steal=0, **here), SimpleNamespace(user=600, steal=200, **here)])
    monkeypatch.setattr(psutil, "cpu_times", read.__next__)
    row = records.counters_between(records.read_counters({}), records.read_counters({}))
    assert row["steal_share"] == 0.25
    assert 0.7 < row["others_share"] < 0.75  # nearly all of 600 s was not this process's


def test_a_round_gets_the_time_of_a_loop_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 < core_speed.mean_loop_us() < 100_000
    assert os.sched_getaffinity(0) == ALLOWED
    monkeypatch.setattr(core_speed, "mean_loop_us", iter([150.0, 210.0]).__next__)
    assert records.counters_between(records.read_counters({}), records.read_counters({}))["loop_us"] == 180


def test_of_many_cores_a_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, seen in ((1, 1), (2, 2), (8, 8), (9, 5), (128, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=count: set(range(cores)))
        assert len(core_speed.cores()) == seen


def own_ms(values: dict[str, float]) -> float:
    return sum(value for name, value in values.items() if name.startswith(records.OWN))


def test_what_a_process_of_the_run_started_is_no_stranger() -> None:
    burn = "import time\nwhile time.process_time() < 1: pass"  # of CPU time: others may keep the cores busy
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE) as parent:
        began = records.read_counters({"server": parent.pid})
        wait_until(lambda: own_ms(records.read_counters({"server": parent.pid})) - own_ms(began) >= 100)
        row = records.counters_between(began, records.read_counters({"server": parent.pid}))
        parent.stdin.close()
    assert not any(name.startswith(records.OWN) for name in row)


def test_a_card_is_found_by_its_index_or_its_uuid() -> None:
    for visible, card in {"": 0, "2,0": 2, "GPU-5ac1": "GPU-5ac1", "MIG-7,GPU-1": "MIG-7"}.items():
        assert records.visible_gpu({"CUDA_VISIBLE_DEVICES": visible}) == card
    assert records.visible_gpu({}) == 0


def test_nvml_that_does_not_know_the_card_is_shut_down_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    shut_down = []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", fail)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: shut_down.append(True))
    with pytest.raises(pynvml.NVMLError):
        records.Gpu({})
    assert shut_down == [True]


@pytest.mark.parametrize(
    ("running", "others"),
    [([1, 2], 0.0), ([1, 2, 3], 1.0), ([40_001, 40_002], None), ([], None)],
    ids=["ours", "one more", "known by other ids", "not told"],
)
def test_processes_on_the_card_are_others_only_where_ours_are_among_them(
    monkeypatch: pytest.MonkeyPatch, running: list[int], others: float | None
) -> None:
    """A container has process ids of its own, and NVML may tell the machine's: all would be others."""
    card = object()
    on_card = [SimpleNamespace(pid=pid) for pid in running]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", {0: card}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-5ac1": card}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", {card: on_card}.__getitem__)
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "GPU-5ac1"}):
        assert records.Gpu(environment).read({1, 2, 9}).get("gpu_other_processes") == others
