"""Toggle spec, on the device: what each request has said so far, and the drafts that its next step tries."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.toggles import spec


class Drafts:
    """A row for each request slot, with its tokens and how many they are; the padding slot comes last. The
    host learns only afterwards how many tokens a step gave."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        self._propose, self._length = spec.PROPOSE[config.spec], config.gives
        width = config.max_context + 2 * config.gives + 1  # a step under way may run past the end once more
        self._tokens = torch.zeros(slots, width, dtype=torch.int64, device=device)
        self._known = torch.ones(slots, dtype=torch.int64, device=device)
        self._offsets = torch.arange(config.gives, device=device)
        self._last = width - 1

    def begin(self, arrays: dict[str, Tensor], batch: int, length: int, chosen: Tensor) -> None:
        """The prompts of a prefill, and the token that each went on with. Of a cached prefix nothing is told,
        so what its slot held before stays: worse drafts, and no wrong token."""
        slots, known = (arrays[name][:batch].to(torch.int64) for name in ("request_slots", "context_lens"))
        positions = arrays["position_ids"][: batch * length].view(batch, length)
        ids = arrays["input_ids"][: batch * length].view(batch, length)
        column = positions[:, :1] + torch.arange(length, device=ids.device)
        trash = torch.full_like(column, self._last)  # where padding goes: nobody gets that far
        self._tokens.index_put_((slots[:, None], column.where(column < known[:, None], trash)), ids)
        self._tokens.index_put_((slots, known), chosen)
        self._known.index_copy_(0, slots, known + 1)

    def propose(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The newest token of each and the drafts behind it, and their positions: int64 [batch, gives]."""
        known, tokens = self._known[slots], self._tokens[slots]
        ids = torch.cat((tokens.gather(1, (known - 1)[:, None]), self._propose(tokens, known)), 1)
        return ids, (known - 1)[:, None] + self._offsets

    def keep(self, slots: Tensor, at: Tensor, chosen: Tensor, kept: Tensor) -> None:
        """What the model says at these positions, of which the first `kept` stand."""
        self._tokens.index_put_((slots[:, None], at + 1), chosen)
        # Padding rows, and a request that has ended, go on: they stay where there is room for a step.
        known = (at[:, 0] + 1 + kept).clamp(max=self._last - self._length)
        self._known.index_copy_(0, slots, known)
