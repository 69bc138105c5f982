"""Which core vLLM computes on, on a CPU: one, the last, as the other engines. Left alone it takes every core.

Where its engine core is a process of its own there are three: the host, that, and the worker, which computes.
The others leave the worker's core to it. On whichever core the kernel put them, equal arms differed in
exposed host time by 0.6 to 1.2% of a step in three runs in a row, always the same way, and nobody knows why.
"""

from __future__ import annotations

import os

from overlap_bench.engines.machine import move_threads
from overlap_bench.engines.vllm import BIND, CORE


def compute_on_one_core(in_process: bool) -> None:
    """Before vLLM is imported. It binds a worker before it imports, so that both arms' would import on that
    one core: two boots side by side then took 44 to 56 s, and take 32 to 46 s where each binds itself."""
    core = str(max(os.sched_getaffinity(0)))
    if in_process:
        os.environ[BIND] = core
    else:
        os.environ |= {BIND: "nobind", CORE: core}


def take_compute_core() -> None:
    """The worker, with all its threads."""
    if CORE in os.environ:
        move_threads({int(os.environ[CORE])})


def leave_compute_core() -> None:
    """Any other process, once it has booted, where there is another core."""
    if CORE in os.environ and (others := os.sched_getaffinity(0) - {int(os.environ[CORE])}):
        move_threads(others)
