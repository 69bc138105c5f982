"""How many blocks a plan needs, and what so many blocks can detect."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

import numpy as np

from overlap_bench.harness.stats.distributions import Floats, chi2_quantile, normal_tail, t_quantile
from overlap_bench.harness.stats.stopping import ALPHA

POWER = 0.8  # of a plan: in 4 of 5 runs a change of that size is detected
CONFIDENCE = 0.8  # of the range that a plan gives


def blocks_needed(sd: float, blocks: int, margin: float) -> tuple[int, int]:
    """How many blocks a fixed plan needs to detect a true change of `margin` with POWER, as a range.

    The SD of the d_i from `blocks` blocks is itself uncertain: its interval at CONFIDENCE is
    sd · sqrt((n-1) / chi2((1 ± CONFIDENCE)/2; n-1)), and each end gives one number by `fixed_plan`. Uses
    the SD alone: a plan made from the observed effect repeats the luck of the run (Hoenig & Heisey, "The
    abuse of power", 2001). Not a reason to add blocks to this run: that is peeking, and gives 9 to 18%
    false alarms (stats.md). Raises ValueError with fewer than two blocks.
    """
    if blocks < 2:
        raise ValueError("the SD of one trial is not known")
    tail = (1 - CONFIDENCE) / 2
    low, high = (_possible_sd(sd, blocks, quantile) for quantile in (1 - tail, tail))
    return fixed_plan(low, margin), fixed_plan(high, margin)


def highest_sd(sd: float, blocks: int) -> float:
    """The upper end of what the SD may be, at CONFIDENCE."""
    return _possible_sd(sd, blocks, (1 - CONFIDENCE) / 2)


def _possible_sd(sd: float, blocks: int, quantile: float) -> float:
    freedom = blocks - 1
    return float(sd * (freedom / chi2_quantile(quantile, freedom)) ** 0.5)


def fixed_plan(sd: float, margin: float, alpha: float = ALPHA) -> int:
    """The smallest n at which the two-sided t test at `alpha` detects a mean of `margin` with POWER.

    Power of the noncentral t with n-1 degrees of freedom and noncentrality margin · sqrt(n) / sd (on the
    log scale a small margin and log(1 + margin) are one). An SD of 0.5 / 1 / 2 / 3% at a margin of 1% needs
    5 / 10 / 34 / 73 blocks.
    """
    if sd <= 0:
        return 2
    most = 2
    while detection_power(margin / sd, most, alpha) < POWER:
        most *= 2
    return bisect_left(range(most), POWER, 2, key=lambda n: detection_power(margin / sd, n, alpha))


def smallest_detectable(sd: float, n: int, alpha: float = ALPHA) -> float:
    """The smallest true change that n blocks of this SD detect with POWER, on the scale of the d_i: the
    inverse of `fixed_plan`. A smaller true change is seen less often, and is not excluded by an undecided
    run. The SD is taken as known, so with few blocks this is an estimate as rough as the SD. Raises
    ValueError with fewer than two blocks."""
    if n < 2:
        raise ValueError("one trial has no SD")
    return sd * _detectable_sds(n, alpha)


@cache  # as _bars
def _detectable_sds(n: int, alpha: float) -> float:
    """The same in standard deviations."""
    low, high = 0.0, 1.0
    while detection_power(high, n, alpha) < POWER:
        low, high = high, high * 2
    while high - low > 1e-6:  # by hand: importing scipy.optimize takes 0.4 s of every command
        middle = (low + high) / 2
        low, high = (low, middle) if detection_power(middle, n, alpha) >= POWER else (middle, high)
    return high


def blocks_to_decide(distance: float, sd: float, blocks: int, one_sided: float, most: int) -> int | None:
    """How many blocks a fresh fixed run needs so that its bounds, each at level `one_sided`, both lie on one
    side of a limit in POWER of cases; None where that is more than `most`.

    `distance`: from the mean of these `blocks` blocks to the limit. It owes as much to luck as the mean
    does, so the true one is taken to be any of 100 equally likely ones, t on n-1 degrees about it: where the
    limit is well inside the interval, the true mean may be anywhere near it, and no number of blocks helps.
    """
    if sd <= 0:
        return 2
    quantiles = (np.arange(100) + 0.5) / 100
    likely = distance / sd + t_quantile(quantiles, blocks - 1) / blocks**0.5

    def decides(n: int) -> bool:
        return detection_power(likely, n, 2 * one_sided) >= POWER

    if not decides(most):
        return None
    return bisect_left(range(2, most), True, key=decides) + 2


def detection_power(target: float | Floats, n: int, alpha: float = ALPHA) -> float:
    """Chance that the two-sided t test of n blocks detects a true mean of `target` standard deviations; of
    several equally likely ones, their mean chance.

    T is noncentral with shift target · sqrt(n): the normal chance averaged over 200 equally likely values of
    the estimated SD (scipy's nct gives nan for small n).
    """
    bar, shift = _bars(n, alpha), np.multiply.outer(target, n**0.5)[..., np.newaxis]
    return float(np.mean(normal_tail(bar - shift) + normal_tail(bar + shift)))


@cache  # searches ask for the same ones at each step, for each metric
def _bars(n: int, alpha: float) -> Floats:
    """What |T| must exceed to be detected, at 200 equally likely values of the estimated SD."""
    critical = float(t_quantile(1 - alpha / 2, n - 1))
    quantiles = (np.arange(200) + 0.5) / 200
    return critical * np.sqrt(chi2_quantile(quantiles, n - 1) / (n - 1))
