"""Where the level of a series moved: E-divisive's recursion and its test by permutation, on ranks.

Of all splits that leave FEWEST values on either side, the one whose sides differ most (the largest
standardised sum of ranks) is a change point if fewer than LEVEL of all orders of the series have a split that
differs as much; then either side is searched by itself. (Matteson & James, "A nonparametric approach for
multiple change point analysis", JASA 2014; Pettitt, "A non-parametric approach to the change-point problem",
1979; Fleming et al., "Hunter", ICPE 2023.)

Ranks, because one value that is far off is no change of level, and because of n values without ties every
series then has the same distribution of its largest split: it is drawn once for each n. How often this is
wrong, and how long it takes to see what: results/reference/proofs/gates.md. A level that came and went
may be hidden, since no single split sets it apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from overlap_bench.harness.stats.distributions import Floats, t_quantile
from overlap_bench.harness.stats.stopping import ALPHA

LEVEL = 0.001  # of each test: a series that grows by a value a night is searched every night
FEWEST = 3  # values of a level: two that are far off are no level
SHORTEST = 14  # values; of fewer, even the best split is matched by more than LEVEL of all orders
ORDERS = 20_000  # that stand for all
AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """`index`: of the first value at the new level. `shift` is the mean of that level less that of the one
    before it, in [low, high] at 95% if the place is right; a place that was searched for flatters it a
    little."""

    index: int
    p: float
    shift: float
    low: float
    high: float


def change_points(values: Sequence[float]) -> list[ChangePoint]:
    """Every change point of a series, the first one first."""
    series = np.asarray(values, np.float64)
    found = sorted(_found(series, 0, len(series)))
    starts = [0, *(index for index, _ in found), len(series)]
    return [
        _between(index, p, series[before:index], series[index:end])
        for (index, p), before, end in zip(found, starts, starts[2:], strict=False)
    ]


def scatter(values: Sequence[float], points: Sequence[ChangePoint]) -> float | None:
    """The SD of the values within their levels; None where each is a level of its own."""
    series = np.asarray(values, np.float64)
    levels = np.split(series, [each.index for each in points])
    freedom = len(series) - len(levels)
    return None if freedom < 1 else float(np.sqrt(sum(map(_squares, levels)) / freedom))


def _found(series: Floats, begin: int, end: int) -> Iterator[tuple[int, float]]:
    """The change points of series[begin:end]: index, p."""
    part = series[begin:end]
    if len(part) < SHORTEST:
        return
    from scipy.stats import rankdata  # half a second, for the few that keep a history

    apart = differences(rankdata(part)[None])[0]
    largest = int(np.argmax(apart))
    split, p = begin + FEWEST + largest, _p(len(part), float(apart[largest]))
    if p < LEVEL:
        yield split, p
        yield from _found(series, begin, split)
        yield from _found(series, split, end)


def differences(rows: Floats) -> Floats:
    """How far the sides of each split are apart, in SDs of the sum of ranks on its left: a row for each row
    of ranks, a column for each split, the first one after FEWEST values."""
    n = rows.shape[1]
    left = np.arange(FEWEST, n - FEWEST + 1)
    sums = np.cumsum(rows, axis=1)[:, left - 1]
    expected, spread = left * (n + 1) / 2, np.sqrt(left * (n - left) * (n + 1) / 12)
    return np.asarray(np.abs(sums - expected) / spread, np.float64)


def _p(n: int, apart: float) -> float:
    """The share of orders that have a split at least so far apart, this order among them."""
    as_far = ORDERS - int(np.searchsorted(largest_splits(n), apart - 1e-9))
    return (1 + as_far) / (1 + ORDERS)


@cache
def largest_splits(n: int) -> Floats:
    """How far the sides of the largest split are apart in ORDERS random orders of n values; sorted."""
    random = np.random.default_rng(n)
    rows = np.tile(np.arange(1.0, n + 1), (AT_ONCE, 1))
    drawn = (differences(random.permuted(rows, axis=1)).max(axis=1) for _ in range(ORDERS // AT_ONCE))
    found: Floats = np.sort(np.concatenate([*drawn]))
    return found


def _between(index: int, p: float, old: Floats, new: Floats) -> ChangePoint:
    shift = float(new.mean() - old.mean())
    freedom = len(old) + len(new) - 2
    variance = (_squares(old) + _squares(new)) / freedom
    error = (variance * (1 / len(old) + 1 / len(new))) ** 0.5
    half = float(t_quantile(1 - ALPHA / 2, freedom)) * error
    return ChangePoint(index, p, shift, shift - half, shift + half)


def _squares(level: Floats) -> float:
    return float(((level - level.mean()) ** 2).sum())
