"""The card that SGLang 0.4.4's own host code runs against: the common one, and what this release asks of it
besides: copies that block, and FlashInfer.

There is one stream that takes time, the forward thread's: whoever launches there and then reads a value back
waits until all that was launched before is done. What the scheduler's thread launches on its own stream is
over at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from threading import get_ident, get_native_id
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch

from overlap_bench.engines.paced.device import Device
from overlap_bench.engines.sglang_base import card as shared

BLOCKING = ("cpu", "item", "tolist")  # of a tensor on a card


@dataclass
class Card(Device):
    """`thread`: the one that launches forward passes, whose stream is busy with them; `native`: as the kernel
    numbers it."""

    thread: int = 0
    native: int = 0

    def forward(self) -> None:
        if self.thread != get_ident():
            self.thread, self.native = get_ident(), get_native_id()
        super().forward()

    def read_back(self) -> None:
        """Wait for a value that is copied to the host, behind all that this thread has launched."""
        if not self.serving or get_ident() != self.thread:
            return
        waits = perf_counter_ns() < self.clock.free
        self.wait(self.clock.free + self.ledger.copy_ns, self.program)
        if waits and self.program.launch_ns < 0:  # planning: from here on the device waits for the host
            self.program.prepare_ns = perf_counter_ns()

    def plan(self, *given: Any) -> list[int]:
        """Plan as FlashInfer does: computed on the host in C++, and copied to the device."""
        self.spend(self.ledger.copy_ns)
        return []


def install(card: Card) -> None:
    """Put it in the place of CUDA in this process. Before SGLang makes its workers."""
    shared.take_place(card)
    for name in BLOCKING:
        setattr(torch.Tensor, name, _blocking(card, getattr(torch.Tensor, name)))


def _blocking(card: Card, read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def reading(tensor: Any, *given: Any, **named: Any) -> Any:
        card.read_back()
        return read(tensor, *given, **named)

    return reading


def torch_without_cuda() -> ModuleType:
    """A torch for a module that says `with torch.device("cuda")`."""
    own = ModuleType("torch")
    own.__dict__.update(vars(torch))
    own.__dict__["device"] = lambda name: torch.device("cpu")
    return own


class Wrapper:
    """FlashInfer's wrappers of attention, as far as planning goes: what SGLang gives and reads of them."""

    card: Card

    def __init__(
        self,
        workspace: Any,
        layout: str,
        *,
        backend: str = "auto",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        **buffers: Any,
    ) -> None:
        self.device = torch.device("cpu")
        self.is_cuda_graph_enabled = use_cuda_graph
        self.use_tensor_cores = use_tensor_cores
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = None
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._fixed_batch_size = len(paged_kv_last_page_len_buffer) if use_cuda_graph else 0
        self._cached_module = self.card  # which plans

    def begin_forward(self, *given: Any, **named: Any) -> None:
        """Plan a prefill: it reads lengths back too."""
        self.card.read_back()
        self.card.plan()


def lengths(starts: Any, last_page: Any, page_size: int) -> Any:
    """Tokens of each request, by where its pages start and how much of the last one is used."""
    return (starts[1:] - starts[:-1] - 1).clamp(min=0) * page_size + last_page


def counted(count: int, device: str) -> Any:
    return torch.arange(count, dtype=torch.int32, device=device)
