"""What a delay of a known size costs: nothing up to a slack, then so much for each microsecond of it.

    cost = slope * max(0, delay - slack)

Slope 0: the delay is hidden, whatever its size. Slope 1 and no slack: all of it is felt. Above 1 it is paid
more than once. Coz (Curtsinger & Berger, SOSP'15) fits such lines for programs, by slowing all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from overlap_bench.harness.stats.distributions import Floats
from overlap_bench.harness.stats.paired import half_width

HIDDEN = 0.3  # a slope beyond the best knee that is below this is no knee
PARTLY = 0.05  # and a slope over all delays that is surely above this hides not all of them
BESIDE = 0.1  # of what the largest delay is beyond the knee, what another one has to be
TRIMMED = 0.2  # of the costs of one size, at each end


@dataclass(frozen=True, slots=True)
class Line:
    """`slack` None: no knee within the delays, of which the slope is then over all."""

    slope: float
    slack: float | None


@dataclass(frozen=True, slots=True)
class Knee:
    """The line of several trials, with 95% intervals. `slack` None: it is beyond `slack_low`, the largest
    delay that was hidden."""

    slope: float
    slope_low: float
    slope_high: float
    slack: float | None
    slack_low: float
    slack_high: float | None


def points(delays: Floats, costs: Floats, sizes: Floats) -> tuple[Floats, Floats, Floats]:
    """The points of turns, by the size that each was to have: mean delay, trimmed mean cost, how many."""
    found = []
    for size in np.unique(sizes):
        mine = sizes == size
        ordered = np.sort(costs[mine])
        cut = int(TRIMMED * len(ordered))
        found.append((delays[mine].mean(), ordered[cut : len(ordered) - cut].mean(), mine.sum()))
    x, y, n = np.array(found, float).T
    return x, y, n


def fit(x: Floats, y: Floats, n: Floats, knee: bool | None = None, largest: int = 1) -> Line:
    """The line of least squares through `points`, by ascending x, of which so many are of the `largest` size.
    `knee`: whether there is one; None: as it seems, with a smaller size beyond it, too. A slack may come out
    below 0 where there is none: only so is its mean over trials 0."""
    found = []
    for slack in {*(float(each) for each in x if each < x[-1]), *_crossings(x, y, n)}:
        over = np.maximum(0, x - slack)
        slope = float((n * y * over).sum() / (n * over**2).sum())
        found.append((float((n * (y - slope * over) ** 2).sum()), slope, slack))
    _, slope, slack = min(found)
    reached = slope >= HIDDEN and x[-1 - largest] - slack > BESIDE * (x[-1] - slack)
    if reached if knee is None else knee:
        return Line(slope, slack)
    return Line(float((n * x * y).sum() / (n * x**2).sum()), None)


def _crossings(x: Floats, y: Floats, n: Floats) -> Iterator[float]:
    """Where the straight lines through the last points, from each point on, are 0. The best knee is one of
    them, or a point."""
    for first in range(len(x) - 1):
        mine, costs, weights = x[first:], y[first:], n[first:] / n[first:].sum()
        apart = mine - (weights * mine).sum()
        if (spread := float((weights * apart**2).sum())) > 0:
            slope = float((weights * apart * costs).sum()) / spread
            crossing = float((weights * mine).sum() - (weights * costs).sum() / slope) if slope > 0 else 0.0
            if -x[-1] < crossing < x[first]:
                yield crossing


def over_trials(trials: Sequence[tuple[Floats, Floats, Floats]]) -> Knee:
    """One line of all trials, by the mean of theirs and what they scatter by. `trials`: points of each; at
    least two. Whether there is a knee is decided by all of them together."""
    x, y, n = (np.concatenate(each) for each in zip(*trials, strict=True))
    order = np.argsort(x)
    every = x[order], y[order], n[order]
    reached = fit(*every, largest=len(trials)).slack is not None
    lines = [fit(*each, knee=reached) for each in trials]
    slopes = np.array([each.slope for each in lines])
    half = half_width(float(slopes.std(ddof=1)), len(slopes))
    slope = float(slopes.mean())
    if not reached:
        best = fit(*every, knee=True)
        felt = best.slope >= HIDDEN  # of the largest size, which alone tells no slope
        # A part of each us is felt, from the first on.
        if not felt and slope - half > PARTLY and (best.slack or 0.0) <= every[0][0]:
            return Knee(slope, slope - half, slope + half, 0.0, 0.0, 0.0)
        hidden = every[0][-1 - len(trials) if felt else -1]
        return Knee(slope, slope - half, slope + half, None, float(hidden), None)
    slacks = np.array([each.slack for each in lines], float)
    wide, slack = half_width(float(slacks.std(ddof=1)), len(slacks)), float(slacks.mean())
    return Knee(
        slope, slope - half, slope + half, max(0.0, slack), max(0.0, slack - wide), max(0.0, slack + wide)
    )
