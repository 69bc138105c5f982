"""Paired blocks to an effect and its interval. Pure functions; why it is done so, and how often it is wrong:
stats.md.

A block gives d_i = log(after_i / before_i), or after_i - before_i for a metric that can be zero. Model: d_i =
theta + e_i, e_i independent with mean 0 and one variance. theta is estimated by the mean of the d_i, with
Student's t on n-1 degrees of freedom; exp(theta) - 1 is the change as a fraction. (Kalibera & Jones,
"Rigorous benchmarking in reasonable time", ISMM'13; Bulej et al., "Duet benchmarking", ICPE'20.)

Behind it: checks of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlap_bench.harness.stats.distributions import t_quantile, t_tail
from overlap_bench.harness.stats.stopping import ALPHA

Differences = npt.NDArray[np.float64]
Scale = Literal["ratio", "difference"]
EXACT_BLOCKS = 12  # sign flips are enumerated up to here (4,096 of them), drawn beyond
CHECK_BLOCKS = 8  # below this a sign-flip test is too coarse to disagree with anything
DRAWS = 20_000  # sign patterns


@dataclass(frozen=True, slots=True)
class Effect:
    """What n paired blocks say of one metric.

    `before` and `after` are geometric means over blocks for a ratio, so that after/before - 1 is exactly
    `change`; plain means for a difference, where `delta` is after - before in the unit of the metric.
    `change`, `low` and `high` are fractions for a ratio (-0.059 is -5.9%); `low` and `high` are in the unit
    for a difference. `sd` is the sample SD of the paired d_i (log ratio or difference). With one block
    there is no `low`, `high`, `sd` or `p`.
    """

    scale: Scale
    blocks: int
    before: float
    after: float
    change: float | None
    delta: float
    low: float | None
    high: float | None
    sd: float | None
    p: float | None


def paired(before: Sequence[float], after: Sequence[float], scale: Scale) -> Differences:
    """The d_i of the model above. Raises ValueError for unequal lengths, no blocks, or a ratio of values
    that are not all positive and finite."""
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if first.shape != second.shape or first.ndim != 1 or first.size == 0:
        raise ValueError("before and after need one value per trial each, and at least one trial")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("a trial has no finite value")
    if scale == "difference":
        return np.subtract(second, first)
    if (first <= 0).any() or (second <= 0).any():
        raise ValueError("a ratio needs positive values; use differences")
    return np.subtract(np.log(second), np.log(first))


def effect(
    before: Sequence[float], after: Sequence[float], scale: Scale = "ratio", alpha: float = ALPHA
) -> Effect:
    """Mean, t interval at level 1 - alpha and two-sided t test of the paired blocks: mean(d) ± t(1 - alpha/2;
    n-1) · sd(d) / sqrt(n), back-transformed by expm1 for a ratio (which makes it asymmetric about the
    change)."""
    differences = paired(before, after, scale)
    n = len(differences)
    mean = float(differences.mean())
    if n == 1:
        return _effect(before, after, scale, mean, None, None, None)
    sd = float(differences.std(ddof=1))
    half = half_width(sd, n, alpha)
    return _effect(before, after, scale, mean, (mean - half, mean + half), sd, t_test(mean, sd, n))


def _effect(
    before: Sequence[float],
    after: Sequence[float],
    scale: Scale,
    mean: float,
    interval: tuple[float, float] | None,
    sd: float | None,
    p: float | None,
) -> Effect:
    """The effect of a mean and its interval on the scale of the d_i, transformed back for a ratio."""
    n = min(len(before), len(after))
    low, high = (None, None) if interval is None else (as_change(end, scale) for end in interval)
    if scale == "difference":
        first, second = float(np.mean(before)), float(np.mean(after))
        return Effect(scale, n, first, second, None, mean, low, high, sd, p)
    first, second = float(np.exp(np.log(before).mean())), float(np.exp(np.log(after).mean()))
    return Effect(scale, n, first, second, as_change(mean, scale), second - first, low, high, sd, p)


def half_width(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Half of the t interval: t(1 - alpha/2; n-1) · sd / sqrt(n), on the scale of the d_i. It is also the
    smallest |mean| that n blocks of this SD would call a change."""
    return float(t_quantile(1 - alpha / 2, n - 1) * sd / n**0.5)


def as_change(value: float, scale: Scale) -> float:
    """A width or mean on the scale of the d_i as it is shown: a fraction, or in the metric's unit."""
    return float(np.expm1(value)) if scale == "ratio" else value


def unpaired(before: Sequence[float], after: Sequence[float], scale: Scale = "ratio") -> Effect:
    """Change and interval of two runs that were *not* interleaved: Welch's t, one value per block. What the
    machine did in between is in the change, so it carries no verdict (stats.md, Two runs).

    `blocks` is the smaller number of the two; `sd` is None, there being no pairs. Under two blocks on a side
    there is no interval. Source: Welch, "The generalization of 'Student's' problem", Biometrika 1947.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if scale == "ratio":
        first, second = np.log(first), np.log(second)
    mean = float(second.mean() - first.mean())
    if min(len(first), len(second)) == 1:
        return _effect(before, after, scale, mean, None, None, None)
    if not np.ptp(first) and not np.ptp(second):  # no spread at all: the limit of the formula
        return _effect(before, after, scale, mean, (mean, mean), None, 1.0 if mean == 0 else 0.0)
    from scipy.stats import ttest_ind  # half a second, for the few that were not interleaved

    welch = ttest_ind(second, first, equal_var=False)
    interval = welch.confidence_interval(1 - ALPHA)
    ends = float(interval.low), float(interval.high)
    return _effect(before, after, scale, mean, ends, None, float(welch.pvalue))


def t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of H0 "the mean is 0", t on n-1 degrees of freedom. Blocks without any spread at all give
    0 (or 1 where the mean is 0 too): the limit of the formula."""
    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * t_tail(abs(mean) / (sd / n**0.5), n - 1))


def sign_flip(differences: Sequence[float] | Differences) -> float:
    """Two-sided p of the sign-flip test: the share of sign patterns whose |mean| is at least the observed.

    Needs only that the d_i are independent and symmetric about 0 under H0, not normal. Exact (all 2^n
    patterns) up to EXACT_BLOCKS blocks, beyond that DRAWS seeded patterns with the observed one counted in.
    With n blocks no p below 2^(1-n) exists: under six blocks it can't reach 5%. Source: Fisher, "The Design
    of Experiments", 1935, §21; Phipson & Smyth 2010 for counting the observed pattern.
    """
    from scipy.stats import permutation_test  # half a second, for the few runs of so many blocks

    values = np.asarray(differences, float)
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
