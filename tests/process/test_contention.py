"""What a turn is told of other work on the machine: real processes."""

import os
import subprocess
import sys

import pytest

from overlap_bench.engines.contention import Others
from tests.support.bench_command import wait_until

SPENT_NS = 30_000_000
COMPUTES = "while True: pass"


def test_cpu_time_of_others_is_counted_and_that_of_the_run_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = (sys.executable, "-c", COMPUTES), ("sleep", "600")
    with subprocess.Popen(commands[0]) as busy, subprocess.Popen(commands[1]) as idle:
        # Nobody else's work is in /proc: it would be counted, rightly.
        monkeypatch.setattr(
            os, "listdir", lambda _: [str(each) for each in (os.getpid(), busy.pid, idle.pid)]
        )
        everybody, without = Others([os.getpid()]), Others([os.getpid(), busy.pid])
        wait_until(lambda: everybody.cpu_ns() > SPENT_NS)
        counted = without.cpu_ns()
        busy.kill()
        idle.kill()
    assert 0 <= counted < SPENT_NS


def test_a_process_that_begins_later_counts_from_its_begin() -> None:
    others = Others([os.getpid()])
    others.cpu_ns()
    with subprocess.Popen([sys.executable, "-c", COMPUTES]) as other:
        wait_until(lambda: others.cpu_ns() > SPENT_NS)
        other.kill()


def test_on_many_cores_what_fits_beside_a_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others([os.getpid()])
    for cores, held in ((2, 700), (4, 700), (5, 200), (8, 0)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert others.held_ns(300, 1000, 500) == held
    assert others.held_ns(300, -1, 500) == -1
