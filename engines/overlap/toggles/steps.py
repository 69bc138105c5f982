"""steps: how many decode steps one call of the scheduler makes.

Before (`1`): each step is scheduled, told to the device and read back by itself. After (`8`): the device runs
eight decode steps one after another, feeding itself; what the host says of a step it says once for all eight,
and their tokens come back together.

Claim: vLLM 6854 (multi-step scheduling), bubbles of 5 to 13 ms per step gone. It was removed again when
asynchronous scheduling came.

What can go wrong: nothing ends a request in mid-way, so tokens past an EOS, a stop string or a length are
computed and thrown away, and their keys and values must go where they do no harm. Tokens arrive in bursts of
eight, so ITL has two values, and a request that arrives waits for eight steps. The guard is
attention.slots_at: what lies past a row's blocks goes to the dummy block.

The loop over the eight (before, over one) is `decode` in engines/overlap/model.py: it starts at `told` and
goes on by `next_place`. "Step" elsewhere is what one call of the scheduler makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from torch import Tensor

TOGGLE = Toggle(
    name="steps",
    module=__name__,
    choices=("1", "8"),
    changes="how many decode steps the device runs for one call of the scheduler",
    source="vLLM 6854 (multi-step scheduling)",
    counters=("tokens_past_end",),
)
COMPOSING = True  # it changes what a step is made of, so that arms that differ by it have unlike steps


@dataclass(frozen=True, slots=True)
class Place:
    """Where a decode step of [batch] rows is: the token it feeds, that token's position and KV slot, and how
    many tokens each row then has."""

    input_ids: Tensor  # int64
    position_ids: Tensor  # int64
    slot_mapping: Tensor  # int32
    context_lens: Tensor  # int32


def told(arrays: dict[str, Tensor]) -> Place:
    """Before, and the first of eight: as the host says."""
    return Place(*(arrays[name] for name in ("input_ids", "position_ids", "slot_mapping", "context_lens")))


def next_place(place: Place, chosen: Tensor, slots: Callable[[Tensor], Tensor], positions: int) -> Place:
    """After: one token on, worked out on the device. chosen: int64 [batch], what the last step sampled.
    `slots` says where keys and values of positions [batch, 1] go. A row whose request ends in mid-way goes on
    within the model's `positions`, and its slots are in the dummy block once its own blocks are full."""
    at = (place.position_ids + 1).clamp_(max=positions - 1)
    return Place(chosen, at, slots(at[:, None])[:, 0], place.context_lens + 1)
