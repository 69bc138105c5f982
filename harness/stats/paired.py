"""Paired blocks to an effect, its interval and a verdict. Pure functions; nothing here reads a file.

The method as a whole, with the error rates that simulations of it gave: stats.md beside this file. When a
run may stop early is in stats/stopping.py.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import t, ttest_ind

from harness.stats.stopping import ALPHA

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
    return float(t.ppf(1 - alpha / 2, n - 1) * sd / n**0.5)


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
        if np.ptp(first) or np.ptp(second):
            welch = ttest_ind(second, first, equal_var=False)
            interval = welch.confidence_interval(1 - ALPHA)
            low, high, p = float(interval.low), float(interval.high), float(welch.pvalue)
        else:  # no spread at all: the limit of the formula
            low, high, p = mean, mean, 1.0 if mean == 0 else 0.0
    return _effect(before, after, scale, n, mean, low, high, None, p)


def t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of H0 "the mean is 0", t on n-1 degrees of freedom. Blocks without any spread at all give
    0 (or 1 where the mean is 0 too): the limit of the formula."""
    if sd == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * t.sf(abs(mean) / (sd / n**0.5), n - 1))
