"""h2d: how a step's metadata gets to the device.

Before (`pageable`), each array becomes a new tensor in pageable memory and is copied with
non_blocking=True, only a hint for pageable memory: the driver first stages the bytes. After (`pinned`),
lists are written through numpy views into preallocated pinned buffers, from which the device copies by
itself. `pin-per-call` and `packed` are variants: a pinned source without the preallocation, at the cost of
a pinned block and a second copy on the host per array; and one copy in place of one per array.

Claim: roseinfer's blog post on pinned host buffers, HF gpt2 with paged attention and CUDA graphs, one run a
side: 3042 -> 3210 tokens/s (+5.5%), TPOT p50 12.51 -> 11.77 ms (-5.9%).

What can go wrong: a pinned buffer is read by the device later, so rewriting it too early changes the
metadata of a step that is already launched. The guard below is what keeps that from happening; vLLM 24527
and mini-sglang 103 are what happens without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.overlap.layout import ITEM_BYTES, Array

if TYPE_CHECKING:  # the declaration below is read by command lines that must not wait for torch
    import numpy as np
    import torch

    from overlap_bench.engines.devices.base import Buffer, Device, Event, Stream
    from overlap_bench.engines.overlap.batch import Batch
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="h2d",
    module=__name__,
    choices=("pageable", "pin-per-call", "pinned", "packed"),
    changes="how a step's metadata reaches the device: from new pageable tensors, from tensors pinned on "
    "each call, from preallocated pinned buffers, or from one pinned buffer in one copy",
    source="roseinfer (pinned host buffers); vLLM 37006, 45424 (pinning per call)",
    counters=(
        "h2d_pageable_copies",
        "h2d_pageable_bytes",
        "h2d_pinned_copies",
        "h2d_pinned_bytes",
        "staging_wait_ns",
        "pinned_set_wait_ns",
    ),
    after="pinned",
    phases=("metadata", "h2d"),
)


@dataclass(frozen=True, slots=True)
class Metadata:
    """A program's static metadata buffer on the device: its arrays, a handle on each and on the whole.

    `table_rows`: handles on the rows of the block tables that the device keeps, by request slot; none for a
    program that does not read them.
    """

    arrays: tuple[Array, ...]
    targets: dict[str, Buffer]
    whole: Buffer
    table_rows: tuple[Buffer, ...] = ()

    @property
    def batch(self) -> int:
        """The most requests that a step can have."""
        return next(array.count for array in self.arrays if array.name == "request_slots")


class HostToDevice(Protocol):
    def stage(self, batch: Batch) -> Any:
        """On the scheduler's thread: make the metadata ready; the device reads none of it yet."""

    def copy(self, step: Step) -> None:
        """On the launching thread: copy what was staged."""


class Pageable:
    """Before."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        metadata: dict[str, Metadata],
        counters: dict[str, int],
        check_launching: Callable[[], None],
    ) -> None:
        import torch

        self.device, self.stream, self.metadata = device, stream, metadata
        self.tensor = torch.tensor
        self.dtypes = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}

    def stage(self, batch: Batch) -> Batch:
        return batch  # its lists are immutable already

    def copy(self, step: Step) -> None:
        batch = step.batch
        metadata = self.metadata[batch.program.metadata]
        for array in metadata.arrays:
            source = self.source(batch.values[array.name], self.dtypes[array.dtype])
            self.device.to_device(metadata.targets[array.name], source, self.stream)
        for slot, row in batch.changed_rows:
            source = self.source(row, self.dtypes["int32"])
            self.device.to_device(metadata.table_rows[slot], source, self.stream)

    def source(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        """What is copied from."""
        return self.tensor(values, dtype=dtype)


class PinPerCall(Pageable):
    """Between: each new tensor is pinned before it is copied, through the caching pinned allocator."""

    def source(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.device.pin(self.tensor(values, dtype=dtype))


class Pinned:
    """After."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        metadata: dict[str, Metadata],
        counters: dict[str, int],
        check_launching: Callable[[], None],
    ) -> None:
        self.device, self.stream, self.metadata = device, stream, metadata
        self.sets = {
            name: PinnedSet(device, each, counters, check_launching) for name, each in metadata.items()
        }

    def stage(self, batch: Batch) -> PinnedSet:
        pinned = self.sets[batch.program.metadata]
        pinned.wait_until_read()
        for name, values in batch.values.items():
            pinned.views[name][: _length(values)] = _flat(values)
        for view, (_, row) in zip(pinned.row_views, batch.changed_rows, strict=False):
            view[:] = row
        return pinned

    def copy(self, step: Step) -> None:
        pinned, values = step.staged, step.batch.values
        for array in pinned.metadata.arrays:
            source = pinned.tensors[array.name]
            used = _length(values[array.name])
            source = source if used == array.count else source[:used]
            self.device.to_device(pinned.metadata.targets[array.name], source, self.stream)
        self.copy_rows(step)
        pinned.mark_read_from(self.stream)

    def copy_rows(self, step: Step) -> None:
        """Each changed row has its own target, so its own copy; all are issued before the set is marked."""
        targets = step.staged.metadata.table_rows
        for source, (slot, _) in zip(step.staged.rows, step.batch.changed_rows, strict=False):
            self.device.to_device(targets[slot], source, self.stream)


class Packed(Pinned):
    """One step beyond After: the arrays are contiguous, so one copy takes them all, used or not. A prefill's
    are 40 KB at the default prefill_max_tokens of 2,048, however short it is, and grow with that limit."""

    def copy(self, step: Step) -> None:
        pinned = step.staged
        self.device.to_device(pinned.metadata.whole, pinned.whole, self.stream)
        self.copy_rows(step)
        pinned.mark_read_from(self.stream)


class PinnedSet:
    """Preallocated pinned memory for one program's metadata and the rows that go with it, with numpy views,
    and the guard on its reuse."""

    def __init__(
        self,
        device: Device,
        metadata: Metadata,
        counters: dict[str, int],
        check_launching: Callable[[], None],
    ) -> None:
        import torch

        self.device, self.metadata, self.counters = device, metadata, counters
        self.check_launching = check_launching
        self.whole: torch.Tensor = device.pinned(metadata.whole.nbytes, torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {
            array.name: self.whole[array.offset : array.offset + array.nbytes].view(
                getattr(torch, array.dtype)
            )
            for array in metadata.arrays
        }
        self.views: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.rows: tuple[torch.Tensor, ...] = ()  # one for each request that a step can have
        if metadata.table_rows:
            width = metadata.table_rows[0].nbytes // ITEM_BYTES["int32"]
            self.rows = device.pinned(metadata.batch * width, torch.int32).view(-1, width).unbind()
        self.row_views: list[np.ndarray] = [row.numpy() for row in self.rows]
        self._read: Event | None = None
        self._issued = threading.Event()
        self._issued.set()

    def wait_until_read(self) -> None:
        """The guard, on the scheduler's thread: block until the copies of this set's last use were issued
        (the launching thread may not have got to them yet) and are done."""
        began = perf_counter_ns()
        while not self._issued.wait(timeout=1.0):
            self.check_launching()
        if self._read is not None:
            self.device.synchronize(self._read)
        self._issued.clear()
        self.counters["pinned_set_wait_ns"] += perf_counter_ns() - began

    def mark_read_from(self, stream: Stream) -> None:
        """On the launching thread, right after the copies: once they are done, the set may be rewritten."""
        self._read = self.device.record(stream)
        self._issued.set()


def _length(values: Any) -> int:
    return values.size if hasattr(values, "size") else len(values)


def _flat(values: Any) -> Any:
    return values.ravel() if hasattr(values, "ravel") else values


CHOICES: dict[str, Callable[..., HostToDevice]] = {  # each made as Pageable is
    "pageable": Pageable,
    "pin-per-call": PinPerCall,
    "pinned": Pinned,
    "packed": Packed,
}
