"""A worker of vLLM's that sleeps soon after it has nothing to do, and computes on one core, on a CPU.

vLLM's own looks for its next step for a second before it sleeps, on the core that both arms compute on: one
that is parked would take that core from the other. And asleep it can miss that there is one, and wakes 5 s
later: a notification that comes within a millisecond of another may be dropped. So it looks by itself: 20
times a second, for a thousand times made the steps of the other arm 7% longer.
"""

from __future__ import annotations

from functools import partialmethod, wraps
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast as queues

from overlap_bench.engines.processes import skip_teardown
from overlap_bench.engines.vllm.cores import take_compute_core

AWAKE_S = 0.003  # since it began to wait: longer than it does within a step, or between two
LOOK_MS = 50


class Sleeping:
    """What vLLM mixes into its worker (worker_extension_cls). It imports this before it loads the model and
    makes the queue that a worker waits at."""


def _awake_since_it_waits(dequeue: Any) -> Any:
    """vLLM counts from when it last read, which is before it computed. So it slept within each step that took
    longer than AWAKE_S, until it was told to sample: 16 to 116 us of a step of 5 to 8 ms."""

    @wraps(dequeue)
    def dequeued(queue: queues.MessageQueue, *given: Any, **named: Any) -> Any:
        queue._spin_condition.record_read()
        return dequeue(queue, *given, **named)

    return dequeued


skip_teardown()  # of 2 s
take_compute_core()
queues.SpinCondition.__init__ = partialmethod(queues.SpinCondition.__init__, busy_loop_s=AWAKE_S)
queues.SHM_READER_RECHECK_INTERVAL_MS = LOOK_MS
queues.MessageQueue.dequeue = _awake_since_it_waits(queues.MessageQueue.dequeue)
