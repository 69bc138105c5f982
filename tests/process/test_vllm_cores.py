"""Which core vLLM's processes run on, on a CPU."""

import os
import subprocess
import sys

import pytest

from overlap_bench.engines.vllm import CORE

CORES = os.sched_getaffinity(0)
LAST = max(CORES)
THREADED = """
import os, threading
from overlap_bench.engines.vllm import cores
threading.Thread(target=threading.Event().wait, daemon=True).start()
cores.{call}()
print(*(sorted(os.sched_getaffinity(int(each))) for each in os.listdir("/proc/self/task")), sep=";")
"""


def cores_of_threads(call: str, environment: dict[str, str]) -> list[list[int]]:
    """The cores of each thread of a process that has made this call."""
    said = subprocess.check_output(
        [sys.executable, "-c", THREADED.format(call=call)],
        env={name: value for name, value in os.environ.items() if name != CORE} | environment,
        text=True,
    )
    found: list[list[int]] = [
        [int(core) for core in each.strip(" []\n").split(",")] for each in said.split(";")
    ]
    assert len(found) >= 2
    return found


@pytest.mark.parametrize(
    ("call", "computes_on", "cores"),
    [
        ("take_compute_core", {CORE: str(LAST)}, [LAST]),
        ("leave_compute_core", {CORE: str(LAST)}, sorted(CORES - {LAST}) or [LAST]),
        # vLLM was left to bind itself, or computes on a card.
        ("take_compute_core", {}, sorted(CORES)),
        ("leave_compute_core", {}, sorted(CORES)),
    ],
)
def test_a_worker_has_a_core_to_itself_where_there_is_another(
    call: str, computes_on: dict[str, str], cores: list[int]
) -> None:
    """Every thread of it, and of the processes that leave it alone."""
    assert all(each == cores for each in cores_of_threads(call, computes_on))
