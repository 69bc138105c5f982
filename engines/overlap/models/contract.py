"""What an engine asks of a model, and a model of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

A_FEW_TOKENS = range(1, 9)


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


class Model(Protocol):
    """A causal language model on its device."""

    root: nn.Module  # its weights, and the modules whose calls an eager program is counted by
    shape: Shape
    reference: Tensor | None  # [vocabulary]: its author's code's logits behind A_FEW_TOKENS, where it is used

    def hidden(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        """int64 [batch, length] each; [batch, length, hidden] comes back."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary]."""
