"""d2h: how the sampled ids come back to the host.

Before (`blocking`), the ids are copied into pageable memory on the forward stream, as `.tolist()` on a
device tensor does: the host stands still until everything on that stream is done. After (`event`), they are
copied into pinned memory on a stream of their own, and the host waits for an event recorded after it.

Claim: vLLM 22754 replaced `tolist()` because it blocked copies on other streams; its author saw no
difference without such copies.

What can go wrong: reading the pinned ids before copy_done gives the ids of two steps ago.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engines.api import Toggle

if TYPE_CHECKING:
    import torch

    from engines.devices.base import Buffer, Device, Stream
    from engines.overlap.step import Step

TOGGLE = Toggle(
    name="d2h",
    choices=("blocking", "event"),
    changes="how sampled ids come back: by a blocking copy on the forward stream, or by a copy on its own "
    "stream, followed by an event",
    source="vLLM 22754, 22760",
    requires={"blocking": {"schedule": ("serial",)}},
    counters=("d2h_pageable_copies", "d2h_pinned_copies", "wait_copy_done_ns"),
)


class DeviceToHost(Protocol):
    stream: Stream  # the one the copy runs on

    def start(self, step: Step) -> None:
        """On the launching thread, right after the launch of the program."""

    def finish(self, step: Step) -> list[int]:
        """On the scheduler's thread: wait for the ids of a launched step; padding rows included."""


class Blocking:
    """Before."""

    def __init__(self, device: Device, sampled_ids: Buffer) -> None:
        import torch

        self.device, self.sampled_ids = device, sampled_ids
        self.stream = device.stream("forward")
        self.allocate, self.dtype = torch.empty, torch.int64

    def start(self, step: Step) -> None:
        pass

    def finish(self, step: Step) -> list[int]:
        ids: torch.Tensor = self.allocate(step.batch.sampled, dtype=self.dtype)
        self.device.to_host(ids, self.sampled_ids, self.stream)
        values: list[int] = ids.tolist()
        return values


class BehindEvent:
    """After. Two destinations in turn, since the next step's ids may arrive while these are being read."""

    def __init__(self, device: Device, sampled_ids: Buffer) -> None:
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


def choose(choice: str, device: Device, sampled_ids: Buffer) -> DeviceToHost:
    if choice == "blocking":
        return Blocking(device, sampled_ids)
    return {"event": BehindEvent}[choice](device, sampled_ids)
