"""Checks of a decision: the sign-flip test, the effect of position within a block, drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_bench.harness.stats.distributions import t_quantile, t_tail
from overlap_bench.harness.stats.paired import Differences, t_test
from overlap_bench.harness.stats.stopping import ALPHA

EXACT_BLOCKS = 12  # sign flips are enumerated up to here (4,096 of them), drawn beyond
CHECK_BLOCKS = 8  # below this a sign-flip test is too coarse to disagree with anything
DRAWS = 20_000  # sign patterns


def sign_flip(differences: Sequence[float] | Differences) -> float:
    """Two-sided p of the sign-flip test: the share of sign patterns whose |mean| is at least the observed.

    Needs only that the d_i are independent and symmetric about 0 under H0, not normal. Exact (all 2^n
    patterns) up to EXACT_BLOCKS blocks, beyond that DRAWS seeded patterns with the observed one counted in.
    With n blocks no p below 2^(1-n) exists: under six blocks it can't reach 5%. Source: Fisher, "The Design
    of Experiments", 1935, §21; Phipson & Smyth 2010 for counting the observed pattern.
    """
    from scipy.stats import permutation_test  # half a second, for the few runs of so many blocks

    values = np.asarray(differences, float)
    if len(values) < 2:
        return 1.0  # either sign is as likely
    found = permutation_test(
        (values,),
        lambda flipped, axis: flipped.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**EXACT_BLOCKS if len(values) <= EXACT_BLOCKS else DRAWS,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def sign_flip_disagrees(differences: Sequence[float] | Differences) -> bool:
    """Whether the sign-flip test and the t test fall on different sides of ALPHA: a hint that one block
    carries, or hides, the effect. Never below CHECK_BLOCKS blocks."""
    values = np.asarray(differences, float)
    if len(values) < CHECK_BLOCKS:
        return False
    by_t = t_test(float(values.mean()), float(values.std(ddof=1)), len(values))
    return (by_t < ALPHA) != (sign_flip(values) < ALPHA)


@dataclass(frozen=True, slots=True)
class Position:
    """The effect of running last within a block, against running first, as a fraction; with its interval
    where it has one. `left`: what the orders that were drawn leave of it in the change between two arms."""

    change: float
    low: float | None
    high: float | None
    left: float = 0.0

    @property
    def seen(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def weakens(self, margin: float) -> bool:
        """Whether the order may have made the verdict: the effect is seen, and `left` is more than half the
        margin. Its size alone does not tell: nothing of it is left where the orders came out even. Nor does
        an estimate whose interval holds 0: by the spread of the pairs alone, without any position effect, it
        passes half the margin in up to half of all runs."""
        return self.seen and abs(self.left) > margin / 2


def position(differences: Sequence[float] | Differences, after_first: Sequence[bool]) -> Position | None:
    """Effect of running second, from log ratios; None where every block ran in one order.

    Model: d_i = theta + pi · x_i with x_i = +1 where the after arm ran second and -1 where it ran first, so
    pi = (mean of d where after ran second - mean of d where it ran first) / 2, with the pooled two-sample t
    interval on n-2 degrees of freedom. The orders are not balanced: with unequal counts pi leaks into theta
    by pi · mean(x), which is `left`. Source: the 2x2 crossover, Jones & Kenward, "Design and Analysis of
    Cross-Over Trials", ch. 2.
    """
    values, first = np.asarray(differences, float), np.asarray(after_first, float)
    found = position_of_several(
        np.stack([np.zeros_like(values), values], axis=1), np.stack([first, 1 - first], axis=1)
    )
    if found is None:
        return None
    left = float(np.log1p(found.change) * (1 - 2 * first).mean())
    return replace(found, left=float(np.expm1(left)))


def position_of_several(logs: Differences, places: Differences) -> Position | None:
    """Effect of running last of several arms, from the log of each value and its arm's place, 0 for the
    first to run to 1 for the last: float64 [blocks, arms]. None where every block ran in one order.

    Model: log y = block + arm + pi · place + e, by least squares: with the means of blocks and arms taken out
    of both, pi = sum(place · log y) / sum(place^2), on (blocks-1)(arms-1) - 1 degrees of freedom. For two
    arms it is `position`. Its part in a contrast of the arms is pi · mean over blocks of (weights · places).
    Source: row-column designs, op. cit. ch. 5.
    """
    if not np.ptp(places, axis=0).any():
        return None
    x, y = (
        each - each.mean(axis=0) - each.mean(axis=1, keepdims=True) + each.mean() for each in (places, logs)
    )
    squares = float((x**2).sum())
    slope = float((x * y).sum()) / squares
    freedom = (len(x) - 1) * (x.shape[1] - 1) - 1
    if freedom < 1:
        return Position(float(np.expm1(slope)), None, None)
    error = (float(((y - slope * x) ** 2).sum()) / freedom / squares) ** 0.5
    reach = float(t_quantile(1 - ALPHA / 2, freedom)) * error
    return Position(*(float(np.expm1(each)) for each in (slope, slope - reach, slope + reach)))


@dataclass(frozen=True, slots=True)
class Drift:
    """How far all arms moved together from the first block to the last, as a fraction, and its p."""

    change: float
    p: float


def drift(*arms: Sequence[float]) -> Drift | None:
    """Least-squares slope of the arms' mean log over the block number, times n-1; None under 3 blocks.

    What both boots of a block share of it cancels in d_i; what moves between them is a position effect, which
    the drawn orders turn into noise. It says that the machine was not in one state, so that no absolute
    level is to be quoted.
    """
    level = np.log(np.asarray(arms, float)).mean(axis=0)
    n = len(level)
    if n < 3:
        return None
    if np.ptp(level) == 0:
        return Drift(0.0, 1.0)
    x = np.arange(n) - (n - 1) / 2
    squares = float((x**2).sum())
    slope = float((x * level).sum()) / squares
    error = (float(((level - level.mean() - slope * x) ** 2).sum()) / (n - 2) / squares) ** 0.5
    p = 2 * t_tail(abs(slope) / error, n - 2) if error else 0.0
    return Drift(float(np.expm1(slope * (n - 1))), float(p))
