"""d2h: how the sampled ids come back to the host.

Before (`blocking`), the ids are copied into pageable memory on the forward stream, as `.tolist()` on a
device tensor does: the host stands still until everything on that stream is done. After (`event`), they are
copied into pinned memory on a stream of their own, and the host waits for an event recorded after it. One
step further (`thread`), a thread of its own waits for that event and reads the ids; the scheduler's thread
waits for a queue, and never in the driver.

Claims: vLLM 22754 replaced `tolist()` because it blocked copies on other streams; its author saw no
difference without such copies. vLLM 23569 gave results to an output thread, "expected speedup 5-10%" over
async scheduling alone: its worker could launch the next step before the ids were read. The overlap loop
launches step N+1 before it waits for N, whoever waits, so that gain is in `schedule` already. What is left is
a hand-over more on each step, and ids that are read while the scheduler's thread still computes.

What can go wrong: reading the pinned ids before copy_done gives the ids of two steps ago. A thread that reads
late must still find its step's ids: hence two destinations, each written again only after its ids were asked
for. It needs the interpreter to read, which a scheduler that computes keeps for up to a switch interval (5
ms). And what fails on it must end the step that is waited for, or the scheduler's thread would wait for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.tracing import name_thread

if TYPE_CHECKING:
    import torch

    from overlap_bench.engines.devices.base import Buffer, Device, Stream
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="d2h",
    module=__name__,
    choices=("blocking", "event", "thread"),
    changes="how sampled ids come back: by a blocking copy on the forward stream, by a copy on its own "
    "stream followed by an event, or read behind that event by a thread of its own",
    source="vLLM 22754, 22760; 23569 (thread)",
    # A serial loop has nothing to do until it has the ids: a thread could only add its hand-over.
    requires={"blocking": {"schedule": ("serial",)}, "thread": {"schedule": ("overlap",)}},
    counters=(
        "d2h_pageable_copies",
        "d2h_pinned_copies",
        "wait_copy_done_ns",
        "reader_wait_ns",
        "reader_lag_ns",
        "reader_ahead",
    ),
    after="event",
)


class DeviceToHost:
    """`start` and `stop` are nothing, unless a choice has something to do."""

    stream: Stream  # the one the copy runs on

    def start(self, step: Step) -> None:
        """On the launching thread, right after the launch of the program."""

    def finish(self, step: Step) -> list[int]:
        """On the scheduler's thread: wait for the ids of a launched step; padding rows included. To be called
        once per step, in the order of start."""
        raise NotImplementedError

    def stop(self) -> None:
        """No step is started any more."""


class Blocking(DeviceToHost):
    """Before."""

    def __init__(self, device: Device, sampled_ids: Buffer, counters: dict[str, int]) -> None:
        import torch

        self.device, self.sampled_ids = device, sampled_ids
        self.stream = device.stream("forward")
        self.allocate, self.dtype = torch.empty, torch.int64

    def finish(self, step: Step) -> list[int]:
        ids: torch.Tensor = self.allocate(step.batch.sampled, dtype=self.dtype)
        self.device.to_host(ids, self.sampled_ids, self.stream)
        values: list[int] = ids.tolist()
        return values


class BehindEvent(DeviceToHost):
    """After. Two destinations in turn, since the next step's ids may arrive while these are being read."""

    def __init__(self, device: Device, sampled_ids: Buffer, counters: dict[str, int]) -> None:
        import torch

        self.device, self.sampled_ids = device, sampled_ids
        self.forward = device.stream("forward")
        self.stream = device.stream("copy")
        rows = sampled_ids.nbytes // 8
        self.ids = [device.pinned(rows, torch.int64) for _ in range(2)]

    def start(self, step: Step) -> None:
        self.device.wait(self.stream, self.device.record(self.forward))
        self.device.to_host(self._destination(step), self.sampled_ids, self.stream)
        step.copy_done = self.device.record(self.stream)

    def finish(self, step: Step) -> list[int]:
        self.wait_copy_done(step)
        values: list[int] = self._destination(step).tolist()
        return values

    def wait_copy_done(self, step: Step) -> None:
        """The guard on reading: the device writes the ids whenever it gets there."""
        assert step.copy_done is not None  # a step is waited for only once it was launched
        self.device.synchronize(step.copy_done)

    def _destination(self, step: Step) -> torch.Tensor:
        return self.ids[step.number % 2][: step.batch.sampled]


class OnThread(BehindEvent):
    """One step beyond After. Two destinations are still enough: step N+2 is launched only once N's ids were
    asked for, and what is given then is what the reader has read. Counted on the thread that does it:
    `reader_wait_ns`, from the launch of a step to its ids; `reader_lag_ns`, from there to the scheduler's
    thread having them, where it waited; `reader_ahead`, the steps whose ids lay ready when it asked."""

    def __init__(self, device: Device, sampled_ids: Buffer, counters: dict[str, int]) -> None:
        super().__init__(device, sampled_ids, counters)
        self.counters = counters
        self._launched: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[Step, list[int] | BaseException, int]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="reader", daemon=True)
        self._thread.start()

    def start(self, step: Step) -> None:
        super().start(step)
        self._launched.put(step)

    def finish(self, step: Step) -> list[int]:
        asked = perf_counter_ns()
        done, ids, read_ns = self._read.get()
        if isinstance(ids, BaseException):
            raise ids
        assert done is step  # steps come back in the order in which they were started
        self.counters["reader_lag_ns"] += perf_counter_ns() - max(read_ns, asked)
        self.counters["reader_ahead"] += read_ns < asked
        return ids

    def stop(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _loop(self) -> None:
        name_thread("reader")
        while (step := self._launched.get()) is not None:
            began = perf_counter_ns()
            ids: list[int] | BaseException
            try:
                ids = super().finish(step)
            except BaseException as failure:  # raised again where this step is waited for
                ids = failure
            now = perf_counter_ns()
            self.counters["reader_wait_ns"] += now - began  # ahead of the hand-over: a round may end with it
            self._read.put((step, ids, now))


CHOICES: dict[str, Callable[[Device, Buffer, dict[str, int]], DeviceToHost]] = {
    "blocking": Blocking,
    "event": BehindEvent,
    "thread": OnThread,
}
