"""Scores of forced tokens: what lets an accuracy check go through the very steps that are measured.

A forced token is taken in place of the one the model would say, and the log-probability that the model gave
it comes back the way token ids do: both lie in one word of `sampled_ids`. So the way back has no copy, buffer
or event that a measured step's has not, and what would bring a stale id brings a stale score.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from overlap_bench.engines.api import Score

_HALF = 1 << 32


def score(logits: Tensor, out: Tensor, *, targets: Tensor) -> Tensor:
    """The token each row goes on with, int64 [batch]: its target, or the most likely one where it has none.

    logits: [batch, vocabulary]. targets: int64 [batch], below zero for none. out: int64 [batch] gets the id
    of the most likely token in the low half of each word, and in the high half the bits of a float32: the
    log-probability of the token the row goes on with.
    """
    likely = logits.argmax(-1)
    chosen = torch.where(targets >= 0, targets, likely)
    logprobs = logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    torch.add(likely, logprobs.view(torch.int32).to(torch.int64), alpha=_HALF, out=out)
    return chosen


def scores(words: Sequence[int], targets: Sequence[int]) -> tuple[list[int], list[Score]]:
    """What `score` put into words: the tokens that the rows of a step went on with, and a score for each,
    which means nothing for a row without a target. Padding rows at the end of `words` are left out."""
    halves = np.array(words[: len(targets)], dtype="<i8").view("<i4").reshape(-1, 2)
    ids, logprobs = halves[:, 0].tolist(), halves.view("<f4")[:, 1].tolist()
    tokens = [likely if target < 0 else target for likely, target in zip(ids, targets, strict=True)]
    found = [
        Score(logprob, likely == token) for logprob, likely, token in zip(logprobs, ids, tokens, strict=True)
    ]
    return tokens, found
