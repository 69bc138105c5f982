"""From logits to token ids, on the device.

A token that is sampled takes one uniform number, a hash of its request's seed and of its position, and is
found by inverse CDF over the token ids in their order. So it depends on nothing else: not on the batch it is
in, nor on what else was drawn before it. Nothing here needs the host, so all of it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A lower temperature changes nothing, but a logit divided by it may overflow to inf, and softmax give NaN.
_COLDEST = 1e-30


def sample_greedy(logits: Tensor, out: Tensor) -> None:
    """The most likely token of each row: logits [batch, vocabulary] -> out int64 [batch]. The first of equal
    ones wins, as in transformers' generate()."""
    torch.argmax(logits, dim=-1, out=out)


def sample(
    logits: Tensor,
    out: Tensor,
    *,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
) -> None:
    """A token of each row: logits [batch, vocabulary] -> out int64 [batch]; all others are [batch].

    temperatures: float32, 0 is greedy. seeds, int64, and positions, integers: what the row's uniform number
    is made of. top_ks (integers, 0: all) and top_ps (float32, 1: all), given together, filter as
    transformers' warpers do, in their order: temperature, top-k, top-p of what top-k left.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures).clamp(min=_COLDEST)[:, None]
    if top_ks is not None and top_ps is not None:
        lowest = _lowest_kept(scaled, top_ks, top_ps)
        scaled = torch.where(scaled >= lowest, scaled, float("-inf"))
    # float64, and a uniform number one bit short of its precision: a target never reaches the last sum.
    sums = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    targets = uniforms(seeds, positions)[:, None] * sums[:, -1:]
    sampled = (sums <= targets).sum(-1)  # the first sum above the target: never a token of probability 0
    torch.where(greedy, logits.argmax(-1), sampled, out=out)


def _lowest_kept(scaled: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The lowest logit of each row that both filters let through, [batch, 1]. Equal ones stay together."""
    vocabulary = scaled.shape[-1]
    ordered = scaled.sort(-1, descending=True).values
    k = torch.where(top_ks > 0, top_ks, vocabulary).clamp(max=vocabulary).to(torch.int64)
    kth = ordered.gather(-1, k[:, None] - 1)
    probabilities = torch.where(ordered >= kth, ordered, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens: 0 for the first, which stays
    within_p = (before < top_ps[:, None]).sum(-1).clamp(min=1)  # a tiny top_p is 0 in float32
    count = torch.where(top_ps < 1, within_p, vocabulary)
    return torch.maximum(kth, ordered.gather(-1, count[:, None] - 1))


# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), as signed
# numbers: int64 wraps around.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_BITS = 52


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """float64 in [0, 1): the number at `positions` in the stream of each of `seeds`, int64."""
    mixed = _mix(_mix(seeds) + positions.to(torch.int64) * _GAMMA)
    return _shifted(mixed, 64 - _BITS).to(torch.float64) * 2.0**-_BITS


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift brings in the sign."""
    return (state >> by) & ((1 << (64 - by)) - 1)
