"""What an engine asks of a model, and a model of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.devices.loading import one_line


class Attend(Protocol):
    """A step's attention: it has the KV cache, and knows which of it each token may look at."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[batch, heads, length, width], `key` and `value` with the KV heads; out [batch, length, heads,
        width]. `scale`: of the scores; None: 1 / sqrt(width)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What an engine must know of a model to lay out its memory."""

    layers: int
    heads: int
    kv_heads: int
    width: int  # of a head
    vocabulary: int
    positions: int
    eos: tuple[int, ...]
    window: int | None = None  # tokens that a layer looks back at most
    rescaled: int | None = None  # tokens after which a whole batch is given other rotary frequencies
    thresholds: tuple[int, ...] = ()  # numbers of tokens after which its code may do something else


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """What a published model's own code trips over is a reason not to run it; a device that fails is none."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BadSetting(f"{name} does not run on this engine: {one_line(error)}") from error


class Model(Protocol):
    """A causal language model on its device."""

    root: nn.Module  # its weights, and the modules whose calls an eager program is counted by
    shape: Shape

    def reference(self, input_ids: Tensor) -> Tensor | None:
        """Its author's code's logits behind the last two of int64 [1, length], where it runs on that code:
        [2, vocabulary]."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        """int64 [batch, length] each; [batch, length, hidden] comes back."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary]."""
