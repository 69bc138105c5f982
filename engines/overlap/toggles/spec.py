"""spec: whether a decode step tries tokens that may come next, and keeps those that do.

Before (`off`): a decode step computes one token of each request. After (`ngram`): the device looks for the
last place where the two newest tokens stood before, takes what followed there as drafts (prompt lookup), runs
them behind the newest token in one step, and keeps as many as the model would have said itself. Every step
gives one token at least.

Claims: prompt lookup decoding (Saxena 2023; transformers and vLLM have it). Under overlap: SGLang 9588, vLLM
29957 and 32951, +5 to 10%; doubted by SGLang 12411 and 23005, which saw nothing at low concurrency.

What can go wrong: a draft that is not what the model says leaves keys and values that the next step must
overwrite before anyone looks at them. The guard is `visible` in `verify`: a query sees the positions up to
its own, and those from the newest token on this step has written anew. A step runs four times the tokens, so
where drafts are rarely right, or the device has no room for them, it costs more than it gives.

In engines/overlap/model.py, before is `decode` and after is `verify`, with drafts.py and what is below; how
many tokens a request got rides behind the ids, and scheduler.append reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from torch import Tensor

TOGGLE = Toggle(
    name="spec",
    module=__name__,
    choices=("off", "ngram"),
    changes="whether a decode step computes one token of each request, or verifies drafts that are found in "
    "its own text",
    source="prompt lookup decoding; SGLang 9588, vLLM 29957",
    requires={"ngram": {"chunk": ("off",), "steps": ("1",)}},
    counters=("draft_tokens", "accepted_drafts"),
)
COMPOSING = True  # it changes what a step is made of, so that arms that differ by it have unlike steps

NGRAM = 3  # drafts of each request in a step
DRAFTS = {"off": 0, "ngram": NGRAM}


def ngram(history: Tensor, lengths: Tensor) -> Tensor:
    """After. int64 [batch, NGRAM]: what followed the last earlier place of each row's two newest tokens.
    history: int64 [batch, width]; lengths: int64 [batch], the tokens of each row that are known, at least 1.
    Any tokens will do where there was no such place: the model has the last word."""
    newest = history.gather(1, (lengths - 1)[:, None])
    one_before = history.gather(1, (lengths - 2).clamp(min=0)[:, None])
    columns = _range(history.shape[1] - 1, history) + 1
    found = (history[:, 1:] == newest) & (history[:, :-1] == one_before) & (columns < (lengths - 1)[:, None])
    place = (columns * found).amax(1)
    following = place[:, None] + 1 + _range(NGRAM, history)
    return history.gather(1, following.minimum((lengths - 1)[:, None]))


def count_kept(chosen: Tensor, drafts: Tensor) -> Tensor:
    """int64 [batch]: how many of `chosen`, int64 [batch, drafts + 1], stand: the first, and one more for each
    draft in a row that the model said itself."""
    return 1 + (chosen[:, :-1] == drafts).cumprod(1).sum(1)


def _range(count: int, like: Tensor) -> Tensor:
    """0 to count - 1. Not by torch.arange: the command line reads this file, and has no torch in it."""
    return like.new_ones(count).cumsum(0) - 1


PROPOSE = {"ngram": ngram}
