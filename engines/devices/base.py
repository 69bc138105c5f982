"""What an engine asks of an accelerator: memory, in-order streams, events, programs.

The engine knows this file and nothing below it. Two devices honour it: `cuda` (torch.cuda) and `emulated`
(a second process). The words are CUDA's and mean what they mean there:

- A *stream* runs its commands in order; streams run independently of each other.
- `record` marks a point in a stream. Waiting for an event that was never recorded returns at once.
- `to_device` and `to_host` look at the memory they are given, as CUDA's copies do. From or to *pinned*
  memory the device copies by itself, later, and the caller must leave that memory alone until an event says
  so. Memory that is not pinned (pageable) is staged by the caller's thread before the call returns, so the
  caller may reuse it at once; a pageable destination is complete when the call returns.
- A *program* is a function of the loaded module that runs on the device over static buffers. `launch` of a
  captured program is one command; of one that is not, one per kernel on CUDA, per leaf module if emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.pace import Size


class DeviceLost(EngineError):
    """The device died; nothing on it can be waited for any more."""


# Begins the reason of a device that works together with others, of which one did not come. It is not the one
# at fault.
RANK_LOST = "waited for another rank in vain"


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """What to load onto a device: `build` names "package.module:function", called where the device lives as
    build(torch_device, **arguments) -> Module. `arguments` is plain data."""

    build: str
    arguments: dict[str, Any]


class Module(Protocol):
    """Lives on the device. Buffers are static: their addresses never change after `build`."""

    buffers: dict[str, torch.Tensor]  # contiguous uint8 or typed tensors on the device
    programs: dict[str, Callable[..., None]]  # each reads and writes buffers only; arguments are ints
    root: torch.nn.Module  # whose leaf modules an uncaptured launch walks through
    facts: dict[str, Any]  # what it says of itself: plain data, as it may cross a process border

    def sizes(self, program: str, *arguments: int) -> Sequence[Size]:
        """What that program works on with these arguments, which a pace is made from (Pace.ns_of); nothing
        for one that has none."""


class Buffer(Protocol):
    """A handle on a contiguous byte range of one of the module's buffers."""

    nbytes: int


class Event(Protocol):
    """A point in a stream."""


class Stream(Protocol):
    """An in-order queue of commands on the device."""

    name: str


class Device(Protocol):
    """An accelerator. Three groups of calls: at boot, hot (in every step), and between rounds."""

    kind: str  # "cuda", "emulated", or "emulated, paced: " and the pace's name
    name: str  # the card's name, or what the emulated device runs on
    details: dict[str, str]  # versions, staging, cores: for the manifest
    pid: int | None  # the device's own process, where it has one
    counters: dict[str, int]  # h2d_pageable_copies, h2d_pageable_bytes, d2h_pinned_copies, ...

    # -- boot ----------------------------------------------------------------------------------------------

    def load(self, spec: ModuleSpec) -> dict[str, Any]:
        """Build the module on the device; what it says of itself comes back (`module.facts`, plain data).
        Replaces a module loaded before. Raises whatever build raised, as EngineError."""

    def capture(self, program: str, *arguments: int) -> None:
        """Make `launch(program, *arguments)` one command from now on (a CUDA graph there)."""

    def buffer(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """A handle on bytes [offset, offset + nbytes) of a module buffer (nbytes None: to its end)."""

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A new 1-D pinned host tensor, kept for the device's life: allocate at boot only."""

    def stream(self, name: str) -> Stream:
        """The stream of that name; the same one each time."""

    def adopt_thread(self) -> None:
        """Call once in each further thread that will copy or launch (CUDA's device is thread-local)."""

    # -- hot -----------------------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy of `tensor` from the caching pinned allocator (as Tensor.pin_memory): its memory is
        reused once the tensor is dropped and the copies that read it are done."""

    def to_device(self, target: Buffer, source: torch.Tensor, stream: Stream) -> None:
        """Copy all of a contiguous host tensor to the start of `target`."""

    def to_host(self, target: torch.Tensor, source: Buffer, stream: Stream) -> None:
        """Fill a contiguous host tensor from the start of `source`. Pageable target: blocks until done."""

    def launch(self, program: str, *arguments: int, stream: Stream, step: int) -> None:
        """Run a program. `step` tags its device time in `work`."""

    def record(self, stream: Stream) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Later commands of `stream` start only after `event`; the host does not wait."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, GIL released, until `event`. Raises DeviceLost."""

    # -- between rounds ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Block until every stream is empty."""

    def begin_round(self) -> None:
        """Forget device work and counters so far; sets the clock anchor where one is needed."""

    def work(self) -> np.ndarray:
        """int64 [n, 4]: (kind, step, start_ns, end_ns) of what ran since begin_round, on the host's clock;
        kind 0 program, 1 host-to-device copy, 2 device-to-host copy. step is -1 for copies."""

    def memory(self) -> dict[str, int]:
        """Peaks so far, in bytes: "device_peak", "pinned_peak"."""

    def close(self) -> None:
        """Give everything back; the device's process ends."""
