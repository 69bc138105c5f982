"""Paired blocks to an effect and its interval. Pure functions; why it is done so, and how often it is wrong:
stats.md.

A block gives d_i = log(after_i / before_i), or after_i - before_i for a metric that can be zero. Model: d_i =
theta + e_i, e_i independent with mean 0 and one variance. theta is estimated by the mean of the d_i, with
Student's t on n-1 degrees of freedom; exp(theta) - 1 is the change as a fraction. (Kalibera & Jones,
"Rigorous benchmarking in reasonable time", ISMM'13; Bulej et al., "Duet benchmarking", ICPE'20.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlap_bench.harness.stats.distributions import t_quantile, t_tail
from overlap_bench.harness.stats.stopping import ALPHA

Differences = npt.NDArray[np.float64]
Scale = Literal["ratio", "difference"]


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
        if (first <= 0).any() or (second <= 0).any():
            raise ValueError("a ratio needs positive values; use differences")
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
