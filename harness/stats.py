"""Paired blocks to an effect, its interval and a verdict. Pure functions; nothing here reads a file.

The method as a whole, with the error rates that simulations of it gave: stats.md beside this file. When a
run may stop early is in stopping.py.

**Model.** A block is one boot of each arm on the same seeded workload, run next to each other, and is the
only unit of replication: requests of a boot, and rounds within it, share the boot's luck (pooling them gives
25-72% false alarms; stats.md). For a metric that is always positive, block i gives

    d_i = log(after_i / before_i),    d_i = theta + e_i,    e_i independent, mean 0, one variance

and theta is estimated by the mean of the d_i with Student's t on n-1 degrees of freedom. exp(theta) - 1 is
the change as a fraction. For a metric that can be zero d_i = after_i - before_i, in the metric's unit.
With d_i roughly normal the test holds its level from two blocks on; `sign_flip` checks it without
normality. (Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM'13; Bulej et al., "Duet
benchmarking", ICPE'20, who run the two at once.)

**What an interval does not mean.** It is not the range of single blocks, not a range for one request, and
says nothing about another machine, model or workload: it is where the mean change of *this* set-up lies,
if blocks are exchangeable. 95% is the share of such intervals that hold the truth, not the chance for this
one. An interval that holds 0 does not show that there is no effect; only `same` does, and only within its
margin.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from harness import distributions
from harness.design import ALPHA

EXACT_BLOCKS = 12  # sign flips are enumerated up to here (4,096 of them), drawn beyond
CHECK_BLOCKS = 8  # below this a sign-flip test is too coarse to disagree with anything
DRAWS = 20_000  # sign patterns
POWER = 0.8  # of a plan: in 4 of 5 runs a change of that size is detected
CONFIDENCE = 0.8  # of the range that a plan gives

Differences = npt.NDArray[np.float64]
Tested = TypeVar("Tested", bound=Hashable)
Scale = Literal["ratio", "difference"]
Verdict = Literal["same", "faster", "slower", "better", "worse", "undecided"]
CHANGES = ("faster", "slower", "better", "worse")  # the verdicts that say there is a difference


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
        raise ValueError("before and after need one value per block each, and at least one block")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("a block has no finite value")
    if scale == "difference":
        return np.subtract(second, first)
    if (first <= 0).any() or (second <= 0).any():
        raise ValueError("a ratio needs positive values; use differences")
    return np.subtract(np.log(second), np.log(first))


def effect(
    before: Sequence[float], after: Sequence[float], scale: Scale = "ratio", alpha: float = ALPHA
) -> Effect:
    """Mean, t interval at level 1 - alpha and two-sided t test of the paired blocks.

    Interval: mean(d) ± t(1 - alpha/2; n-1) · sd(d) / sqrt(n), back-transformed by expm1 for a ratio (which
    makes it asymmetric about the change). Source: any text on the paired t test; see the module.
    """
    differences = paired(before, after, scale)
    n = len(differences)
    mean = float(differences.mean())
    sd = low = high = p = None
    if n > 1:
        sd = float(differences.std(ddof=1))
        half = half_width(sd, n, alpha)
        low, high = mean - half, mean + half
        p = t_test(mean, sd, n)
    return _effect(before, after, scale, n, mean, low, high, sd, p)


def _effect(
    before: Sequence[float],
    after: Sequence[float],
    scale: Scale,
    n: int,
    mean: float,
    low: float | None,
    high: float | None,
    sd: float | None,
    p: float | None,
) -> Effect:
    """The effect of `mean`, `low` and `high` on the scale of the d_i, transformed back for a ratio."""
    if scale == "difference":
        first, second = float(np.mean(before)), float(np.mean(after))
        return Effect(scale, n, first, second, None, mean, low, high, sd, p)
    first, second = float(np.exp(np.log(before).mean())), float(np.exp(np.log(after).mean()))
    return Effect(
        scale,
        n,
        first,
        second,
        float(np.expm1(mean)),
        second - first,
        None if low is None else float(np.expm1(low)),
        None if high is None else float(np.expm1(high)),
        sd,
        p,
    )


def half_width(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Half of the t interval: t(1 - alpha/2; n-1) · sd / sqrt(n), on the scale of the d_i. It is also the
    smallest |mean| that n blocks of this SD would call a change."""
    return float(distributions.t_quantile(1 - alpha / 2, n - 1) * sd / n**0.5)


def as_change(value: float, scale: Scale) -> float:
    """A width or mean on the scale of the d_i as it is shown: a fraction, or in the metric's unit."""
    return float(np.expm1(value)) if scale == "ratio" else value


def unpaired(before: Sequence[float], after: Sequence[float], scale: Scale = "ratio") -> Effect:
    """Change and interval of two runs that were *not* interleaved: Welch's t, one value per block.

    Model: the two runs are independent samples with a mean and a variance each. What the machine did between
    the two times is in the change, and no number of blocks takes it out: such a comparison keeps its 5% on a
    machine that stands still, and gave 43% false alarms on one that wanders, 99% with a drift (stats.md). So
    it is described, and carries no verdict.
    `blocks` is the smaller number of the two; `sd` is None, there being no pairs. Under two blocks on a side
    there is no interval. Source: Welch, "The generalization of 'Student's' problem", Biometrika 1947.
    """
    first, second = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if scale == "ratio":
        if (first <= 0).any() or (second <= 0).any():
            raise ValueError("a ratio needs positive values; use differences")
        first, second = np.log(first), np.log(second)
    n = min(len(first), len(second))
    mean = float(second.mean() - first.mean())
    low = high = p = None
    if n > 1:
        parts = [float(each.var(ddof=1)) / len(each) for each in (first, second)]
        error = sum(parts) ** 0.5
        if error > 0:
            weights = sum(
                part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True)
            )
            freedom = sum(parts) ** 2 / weights
            half = float(distributions.t_quantile(1 - ALPHA / 2, freedom)) * error
            p = float(2 * distributions.t_tail(abs(mean) / error, freedom))
        else:
            half, p = 0.0, 1.0 if mean == 0 else 0.0
        low, high = mean - half, mean + half
    return _effect(before, after, scale, n, mean, low, high, None, p)


def t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of H0 "the mean is 0", t on n-1 degrees of freedom. Blocks without any spread at all give
    0 (or 1 where the mean is 0 too): the limit of the formula."""
    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * distributions.t_tail(abs(mean) / (sd / n**0.5), n - 1))


# ---------------------------------------------------------------------------------------------------------
# Deciding


def verdict(
    estimate: Effect,
    margin: float,
    better: str,
    is_time: bool,
    p_adjusted: float | None = None,
    alpha: float = ALPHA,
) -> Verdict | None:
    """The decision rule, in its order; None with fewer than two blocks.

    1. `same` if the whole interval lies inside ±margin (with the default alpha: two one-sided tests at 2.5%
       each). A change that was detected can still be called same; `detected` tells. It is not
       multiplicity-controlled: of many metrics some will be called same by luck.
    2. `faster` or `slower` (`better` or `worse` where the metric is no time) if the interval excludes 0. For
       a secondary this is p_adjusted < alpha instead, so that the family of secondaries keeps its level.
    3. `undecided`.

    The margin is a fraction of the before; a metric on the difference scale has none in its own unit and is
    therefore never called same.
    """
    if estimate.low is None or estimate.high is None or estimate.p is None:
        return None
    if estimate.scale == "ratio" and -margin < estimate.low and estimate.high < margin:
        return "same"
    if not detected(estimate, p_adjusted, alpha):
        return "undecided"
    direction = estimate.delta if estimate.change is None else estimate.change
    improved = (direction < 0) == (better == "lower")
    if is_time:
        return "faster" if improved else "slower"
    return "better" if improved else "worse"


def detected(estimate: Effect, p_adjusted: float | None = None, alpha: float = ALPHA) -> bool:
    """Whether a change was detected: the interval excludes 0 or, for one of several, p_adjusted < alpha.
    The two say the same where p_adjusted is p."""
    p = estimate.p if p_adjusted is None else p_adjusted
    return p is not None and p < alpha


def holm(p_values: Mapping[Tested, float]) -> dict[Tested, float]:
    """Holm's step-down adjusted p values, in the order given.

    With p_(1) <= ... <= p_(m): adjusted_(k) = max over j <= k of min(1, (m - j + 1) p_(j)). Rejecting where
    adjusted < alpha keeps the chance of any false alarm among the m at alpha, however they depend on each
    other. Source: Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat. 1979.
    """
    m = len(p_values)
    adjusted = dict(p_values)
    largest = 0.0
    for rank, tested in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (m - rank) * p_values[tested]))
        adjusted[tested] = largest
    return adjusted


# ---------------------------------------------------------------------------------------------------------
# Checking the decision


def sign_flip(differences: Sequence[float] | Differences) -> float:
    """Two-sided p of the sign-flip test: the share of sign patterns whose |mean| is at least the observed.

    Needs only that the d_i are independent and symmetric about 0 under H0, not normal. Exact (all 2^n
    patterns) up to EXACT_BLOCKS blocks, beyond that DRAWS seeded patterns with the observed one counted in.
    With n blocks no p below 2^(1-n) exists: under six blocks it can't reach 5%. Source: Fisher, "The Design
    of Experiments", 1935, §21; Phipson & Smyth 2010 for counting the observed pattern.
    """
    values = np.asarray(differences, float)
    n = len(values)
    observed = abs(float(values.sum()))
    slack = 1e-12 * float(np.abs(values).sum())  # sums of the same terms in another order are ties
    if n <= EXACT_BLOCKS:
        signs = np.array(list(product((1.0, -1.0), repeat=n)))
        return float((np.abs(signs @ values) >= observed - slack).mean())
    signs = np.random.default_rng(0).choice((1.0, -1.0), size=(DRAWS, n))
    hits = int((np.abs(signs @ values) >= observed - slack).sum())
    return (hits + 1) / (DRAWS + 1)


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
    reach = float(distributions.t_quantile(1 - ALPHA / 2, freedom)) * error
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
    x, y = np.arange(n) - (n - 1) / 2, level - level.mean()
    squares = float(x @ x)
    slope = float(x @ y) / squares
    error = (float(((y - slope * x) ** 2).sum()) / (n - 2) / squares) ** 0.5
    p = 2 * float(distributions.t_tail(abs(slope) / error, n - 2)) if error > 0 else 0.0
    return Drift(float(np.expm1(slope * (n - 1))), p)


# ---------------------------------------------------------------------------------------------------------
# Planning


def blocks_needed(sd: float, blocks: int, margin: float) -> tuple[int, int]:
    """How many blocks a fixed plan needs to detect a true change of `margin` with POWER, as a range.

    The SD of the d_i from `blocks` blocks is itself uncertain: its interval at CONFIDENCE is
    sd · sqrt((n-1) / chi2((1 ± CONFIDENCE)/2; n-1)), and each end gives one number by `fixed_plan`. Uses
    the SD alone: a plan made from the observed effect repeats the luck of the run (Hoenig & Heisey, "The
    abuse of power", 2001). Not a reason to add blocks to this run: that is peeking, and gives 9 to 18%
    false alarms (stats.md). Raises ValueError with fewer than two blocks.
    """
    if blocks < 2:
        raise ValueError("the SD of one block is not known")
    tail = (1 - CONFIDENCE) / 2
    freedom = blocks - 1
    low, high = (
        sd * (freedom / float(distributions.chi2_quantile(quantile, freedom))) ** 0.5
        for quantile in (1 - tail, tail)
    )
    return fixed_plan(low, margin), fixed_plan(high, margin)


def fixed_plan(sd: float, margin: float) -> int:
    """The smallest n at which the two-sided t test at ALPHA detects a mean of `margin` with POWER.

    Power of the noncentral t with n-1 degrees of freedom and noncentrality margin · sqrt(n) / sd (on the
    log scale a small margin and log(1 + margin) are one). An SD of 0.5 / 1 / 2 / 3% at a margin of 1% needs
    5 / 10 / 34 / 73 blocks.
    """
    if sd <= 0:
        return 2
    target = margin / sd
    low, high = 1, 2  # the power at `low` is too small; double `high` until its power is enough, then bisect
    while detection_power(target, high) < POWER:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if detection_power(target, middle) >= POWER else (middle, high)
    return high


def smallest_detectable(sd: float, n: int, alpha: float = ALPHA) -> float:
    """The smallest true change that n blocks of this SD detect with POWER, on the scale of the d_i: the
    inverse of `fixed_plan`. A smaller true change is seen less often, and is not excluded by an undecided
    run. The SD is taken as known, so with few blocks this is an estimate as rough as the SD. Raises
    ValueError with fewer than two blocks."""
    if n < 2:
        raise ValueError("one block has no SD")
    if sd == 0:
        return 0.0
    low, high = 0.0, 1.0
    while detection_power(high, n, alpha) < POWER:
        low, high = high, high * 2
    while high - low > 1e-6:  # by hand: importing scipy.optimize takes 0.4 s of every command
        middle = (low + high) / 2
        low, high = (low, middle) if detection_power(middle, n, alpha) >= POWER else (middle, high)
    return sd * high


def detection_power(target: float, n: int, alpha: float = ALPHA) -> float:
    """Chance that the two-sided t test of n blocks detects a true mean of `target` standard deviations.

    T is noncentral with shift target · sqrt(n): the normal chance averaged over 200 equally likely values of
    the estimated SD (scipy's nct gives nan for small n).
    """
    critical = float(distributions.t_quantile(1 - alpha / 2, n - 1))
    quantiles = (np.arange(200) + 0.5) / 200
    bar = critical * np.sqrt(distributions.chi2_quantile(quantiles, n - 1) / (n - 1))
    shift = target * n**0.5
    return float(np.mean(distributions.normal_tail(bar - shift) + distributions.normal_tail(bar + shift)))
