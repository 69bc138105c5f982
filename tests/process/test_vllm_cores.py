"""Which core vLLM's processes run on, on a CPU."""

import os
import subprocess
import sys

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


def cores_of_threads(call: str, **environment: str) -> list[list[int]]:
    """The cores of each thread of a process that has made this call."""
    said = subprocess.check_output(
        [sys.executable, "-c", THREADED.format(call=call)],
        env={**{name: value for name, value in os.environ.items() if name != CORE}, **environment},
        text=True,
    )
    found: list[list[int]] = [
        [int(core) for core in each.strip(" []\n").split(",")] for each in said.split(";")
    ]
    assert len(found) >= 2
    return found


def test_every_thread_of_a_worker_goes_to_the_core_it_computes_on() -> None:
    assert all(each == [LAST] for each in cores_of_threads("take_compute_core", **{CORE: str(LAST)}))


def test_every_thread_of_another_process_leaves_that_core_where_there_is_another() -> None:
    elsewhere = sorted(CORES - {LAST}) or [LAST]
    assert all(each == elsewhere for each in cores_of_threads("leave_compute_core", **{CORE: str(LAST)}))


def test_nothing_moves_where_vllm_was_left_to_bind_itself_or_computes_on_a_card() -> None:
    for call in ("take_compute_core", "leave_compute_core"):
        assert all(each == sorted(CORES) for each in cores_of_threads(call))
