"""A worker of vLLM's that sleeps as soon as it has nothing to do, on a CPU.

vLLM's own looks for its next step for a second before it sleeps, on the core that both arms compute on: one
that is parked would take that core from the other. Asleep, it wakes some tens of microseconds later.
"""

from __future__ import annotations

from functools import partialmethod

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition


class Sleeping:
    """What vLLM mixes into its worker (worker_extension_cls). It imports this before it makes the queue that
    a worker waits at."""


SpinCondition.__init__ = partialmethod(SpinCondition.__init__, busy_loop_s=0)
