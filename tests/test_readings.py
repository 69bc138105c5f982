"""What is read of the machine before and after a round."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from harness import readings


def test_cpu_time_is_that_of_every_thread_to_the_nanosecond() -> None:
    before = time.process_time_ns()
    found = readings.cpu_ns(os.getpid())
    assert before <= found <= time.process_time_ns()


def test_a_process_that_is_gone_is_left_out() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    values = readings.read({"self": os.getpid(), "gone": child.pid})
    assert {name for name in values if "." in name} == {
        "cpu_ms.self",
        "switches_voluntary.self",
        "switches_forced.self",
    }
    with pytest.raises(OSError, match="Invalid argument"):
        readings.cpu_ns(child.pid)


def test_a_round_gets_the_differences() -> None:
    start = readings.read({"self": os.getpid()})
    sum(range(200_000))
    row = readings.between(start, readings.read({"self": os.getpid()}))
    assert row["cpu_ms.self"] > 0
    assert row["switches_voluntary.self"] >= 0
    assert row["load_1m"] >= 0
