"""From an effect to a verdict: the decision rule, and Holm's correction for several metrics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Literal, TypeVar

from overlap_bench.harness.stats.paired import Effect
from overlap_bench.harness.stats.stopping import ALPHA

Tested = TypeVar("Tested", bound=Hashable)
Verdict = Literal["same", "faster", "slower", "better", "worse", "undecided"]
CHANGES = ("faster", "slower", "better", "worse")  # the verdicts that say there is a difference


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
