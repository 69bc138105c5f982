"""Where the outputs of two arms diverge, and whether at a near-tie. Pure: frames in, frames and counts out.

In half precision, and on a GPU in any precision, the last digit of a logit depends on what else is in the
batch, and can flip the choice between two tokens that the model rates equally likely; what follows is another
text. So the first token that differs decides: the model is given the prompt and what both arms agreed on
(run/teacher_forcing.py). Where it rates neither arm's token less likely than its likeliest by more than
rounding explains, it is a near-tie; anything else is a fault.

How much rounding explains depends on the model (in bfloat16 0.1 logits in the preset gpt2, 0.6 in llama-1b:
results/reference/proofs/tokens.md), so it is measured: the model is asked about two tokens twice, after a
prefill of all before them, and after tokens decoded one by one. And large logits are widely spaced, in
bfloat16 by 0.5 from 64 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

# Between two logits below USUAL, by dtype: the gap that another order of summation can reverse in any model;
# in half precision four units in the last place.
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.03}
USUAL = 16
# Times the gap that nine in ten pairs of answers about the same tokens keep within: 6.6 SDs if normal.
TIMES = 4
# Times NEAR_TIE, the cap: answers further apart come from a fault, which must not excuse itself.
MOST = 10
ENDED = -1  # in place of a token: that output ends here
GAPS = ["before_gap", "after_gap"]


def find(requests: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """One row for each output of a later arm that differs from the first arm's; `requests`: those of a block.

    arm, round, request; before (the first arm); agreed (list: the token ids before the first that differs);
    before_token and after_token (the first that differ, or ENDED); before_gap and after_gap (how much less
    likely than the likeliest token each of them is, in logits; NaN: not judged yet); near_tie (where both are
    below this, it is one). Requests that failed, and outputs that are text, are left out.
    """
    import pandas as pd

    first, *others = arms
    answered = requests[(requests["error"] == "") & (requests["token_ids"].map(len) > 0)]
    by_arm = {arm: answered[answered["arm"] == arm].set_index(["round", "request"]) for arm in arms}
    rows = []
    for arm in others:
        both = by_arm[arm].join(by_arm[first].add_suffix("_before"), how="inner")
        for (index, request), row in both[both["digest"] != both["digest_before"]].iterrows():
            before, after = row["token_ids_before"], row["token_ids"]
            agreed = _agreed(before, after)
            parting = (before[:agreed], _at(before, agreed), _at(after, agreed))
            rows.append((arm, index, request, first, *parting))
    columns = ("arm", "round", "request", "before", "agreed", "before_token", "after_token")
    return pd.DataFrame(rows, columns=columns).assign(before_gap=np.nan, after_gap=np.nan, near_tie=np.nan)


def _agreed(before: Sequence[int], after: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


def _at(tokens: Sequence[int], place: int) -> int:
    return int(tokens[place]) if place < len(tokens) else ENDED


def between(divergences: pd.DataFrame, arms: Sequence[str]) -> pd.DataFrame:
    """The divergences of two arms, whichever is the run's first; where neither is, there are none."""
    if not len(divergences):
        return divergences
    return divergences[divergences["before"].isin(arms) & divergences["arm"].isin(arms)]


def near_ties(divergences: pd.DataFrame) -> int | None:
    """How many of them are near-ties; None where there are no divergences, or one is not judged."""
    if not len(divergences) or divergences[GAPS].isna().any(axis=None):
        return None
    return int((divergences[GAPS].max(axis=1) < divergences["near_tie"]).sum())


def near_tie(dtype: str, largest_logit: float, apart: Sequence[float]) -> float:
    """The gap below which a divergence is a near-tie, in logits. `apart`: how far apart two answers of the
    model about the same two tokens are, for some pairs of tokens; NaN where it gave none."""
    least = NEAR_TIE[dtype] * max(1, largest_logit / USUAL)
    answered = [abs(each) for each in apart if not np.isnan(each)]
    if not answered:
        return least
    return float(np.clip(TIMES * np.quantile(answered, 0.9), least, max(least, MOST * NEAR_TIE[dtype])))


def widest_gap(tables: Sequence[pd.DataFrame]) -> float | None:
    """The widest gap of the divergences that were judged, in logits, leaving out infinite ones, such as of
    outputs that ended (infinite where all are); None where none was judged."""
    sides = [table[GAPS].to_numpy().ravel() for table in tables if len(table)]
    gaps = np.concatenate([[], *sides])
    judged = gaps[~np.isnan(gaps)]
    if not len(judged):
        return None
    finite = judged[np.isfinite(judged)]
    return float(finite.max()) if len(finite) else np.inf
