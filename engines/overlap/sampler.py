"""From logits to token ids, on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_greedy(logits: Tensor, out: Tensor) -> None:
    """The most likely token of each row: logits [batch, vocabulary] -> out int64 [batch]. The first of equal
    ones wins, as in transformers' generate()."""
    torch.argmax(logits, dim=-1, out=out)
