"""The time line of a device that is told how long to take. No test asserts that anything was in time."""

import signal
import threading
from time import perf_counter_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import clock
from overlap_bench.engines.clock import Clock, Lateness, spend

WORK = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 10_000)), min_size=1, max_size=30)


@given(WORK)
def test_work_queues_up_and_each_piece_takes_its_time(work: list[tuple[int, int]]) -> None:
    """Whenever it is launched: `work` has (idle time of the host before a launch, length)."""
    clock._passing()  # measures what a tick of the processor is worth, once
    now = 1000
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "perf_counter_ns", lambda: now)
        device, end = Clock(), 0
        for idle, length in work:
            now += idle
            begun, end = max(now, end), device.launch(length)
            assert end == begun + length == device.free
        assert device.launch(5, at=end + 100) == end + 105


@given(st.lists(st.integers(0, 10_000), max_size=300))
def test_lateness_has_the_mean_and_the_99th_percentile(late: list[int]) -> None:
    device = Clock()
    device._late.extend(late)
    found, ranked = device.lateness, sorted(late)
    assert found.waits == len(late)
    if late:
        assert found.mean_ns == pytest.approx(sum(ranked) / len(ranked))
        assert sum(each <= found.p99_ns for each in ranked) >= 0.99 * len(ranked)
        assert found.p99_ns in ranked


@pytest.mark.parametrize("native", [True, False])
def test_nobody_comes_back_before_the_end(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(clock, "_passing", lambda: clock._Portable(int))
    device = Clock()
    for ns in (0, 2_000, 100_000, 1_000_000):
        end = device.launch(ns)
        device.wait(end)
        assert perf_counter_ns() >= end
    device.wait(0)
    device.wait(device.free)  # over: no wait, and not counted
    assert device.lateness.waits <= 3
    begin = perf_counter_ns()
    spend(300_000)
    assert perf_counter_ns() - begin >= 290_000
    spend(-1)
    assert Clock().lateness == Lateness(0, 0.0, 0)


def test_a_wait_lets_other_threads_run_and_signals_in() -> None:
    """It would pass its second awake, or with the lock held, and the alarm would come after it."""
    device, came = Clock(), []
    end = device.launch(1_000_000_000)
    other = threading.Thread(target=lambda: came.append(perf_counter_ns()))
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(perf_counter_ns()))
    try:
        other.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        device.wait(end)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(came) == 2
    assert max(came) < end <= perf_counter_ns()
