"""Which of several commits changed a metric, by measuring: a posterior over commits, and which one to measure
next.

A trial measures the good commit, the bad one and a commit between them, interleaved. It gives u = log(bad /
good) and v = log(commit / good) - u / 2. With equal, independent noise in the three arms u and v are
independent: u has mean delta, the whole effect, and v has mean (f - 1/2) · delta and 3/4 of u's variance. f,
the commit's level, is 0 where it is as good, 1 where it is as bad as the ends.

**Model.** Levels change at one commit (PRIOR: 90%), at two or at three; each set of that many commits is as
likely as any other, and a level between the first and the last is any of LEVELS. Noise is Student's t on 4 or
on 30 degrees of freedom, since a trial in so many is far off; its size and delta are summed over. Commits
between two that were measured can't be told from each other, and two changes there are seen as one. What is
known of one commit counts for no more than FLOOR, since it may be odd by itself, and noise is no smaller than
a part of the effect (FINEST), since commits differ a little without a cause.

**Next** is the commit whose level is expected to tell most (mutual information) for each minute that it takes
(Horstein, "Sequential transmission using noiseless feedback", 1963, is the one with equal minutes).

How often it is right: results/reference/proofs/bisection.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlap_bench.harness.stats.distributions import Floats, t_quantile

ALPHA = 0.01  # of saying that good and bad differ where they do not
LOOKS = (4, 6, 9, 13, 18, 24, 32)  # trials of good and bad, after which it is looked whether they do
CLAIMED = 0.95  # posterior at which a commit is named
PRIOR = (0.9, 0.07, 0.03)  # of one change, two, three
LEVELS = np.arange(-12, 21) / 8  # of a commit: 0 as good, 1 as bad
AS_GOOD, AS_BAD = int(np.flatnonzero(LEVELS == 0)[0]), int(np.flatnonzero(LEVELS == 1)[0])
SMALLEST = 0.25  # of the effect: what changes by less is no change
NOT_GOOD, NOT_BAD = (1.0 * (np.abs(LEVELS - each) >= SMALLEST) for each in (0, 1))
FREEDOMS = (4.0, 30.0)
FLOOR = -25.0  # of a log likelihood beside the best level's
LOWEST = -1200.0  # of all commits' together, at half of which exp is far from where it overflows
FINEST = 1 / 20  # of the effect
UNSEEN, FEWEST_UNSEEN = 0.25, 2  # of all commits, and commits: a stretch that may go unmeasured
OF_V = 0.75**0.5  # v's scatter beside u's
SCALES = 2.0 ** np.arange(-1.5, 1.5, 0.5)  # of noise, beside the SD of u
SHIFTS = np.arange(-2.0, 2.5)  # of delta, in its standard errors
OUTCOMES = 96  # at which what a trial may say is looked at
MOST_TRIALS = 200  # of a search that is foretold
FORETOLD = 25  # searches


@dataclass(frozen=True, slots=True)
class Trial:
    """`commit`: its place among those after good, 1 to n - 1 of n with bad as the last; 0 where the trial
    was of good and bad alone. `effect` is log(bad / good), `change` log(commit / good). `calm`: other work
    hardly disturbed it; it counts all the same."""

    commit: int
    effect: float
    change: float = 0.0
    calm: bool = True


@dataclass(frozen=True, slots=True)
class Ends:
    """Whether good and bad differ: `mean` of log(bad / good) in [low, high] at the level of the last look."""

    verdict: Literal["different", "equal", "open"]
    mean: float
    low: float
    high: float
    sd: float


@dataclass(frozen=True, slots=True)
class Posterior:
    """`steps`: the chance of one change, two, three. `commits`: the chance that the level changes there, by
    place (the first is good's, which is 0). `levels`: of each commit, the chance of each of LEVELS. `best`:
    the likeliest set of gaps between measured commits in which the level changes, each as (first, last)
    place, and `claim` its chance. `noise`: SD of u, and `effect`: delta, both as expected."""

    steps: Floats
    commits: Floats
    levels: Floats
    bounds: tuple[int, ...]  # places that were measured, good and bad among them
    best: tuple[tuple[int, int], ...]
    claim: float
    effect: float
    noise: float

    def is_sure(self, skipped: Collection[int]) -> bool:
        """Whether the claim is enough, and its gaps have no commit in them that could be measured."""
        inside = {place for first, last in self.best for place in range(first, last)}
        return self.claim >= CLAIMED and inside <= {*skipped}

    def unseen(self, skipped: Collection[int]) -> int | None:
        """The commit in the middle of the widest stretch of which nothing was measured, where that is wider
        than a change may be that comes and goes unseen; None where there is none."""
        left_out = {*skipped}
        widest = max(FEWEST_UNSEEN, UNSEEN * self.bounds[-1])
        gaps = sorted((first - last, first, last) for first, last in pairwise(self.bounds))
        for _, first, last in gaps:
            inside = [place for place in range(first + 1, last) if place not in left_out]
            if last - first > widest and inside:
                return min(inside, key=lambda place: abs(2 * place - first - last))
        return None

    def found(self, skipped: Collection[int] = ()) -> bool:
        """Whether it can be told: it is sure, and no long stretch went unseen."""
        return self.is_sure(skipped) and self.unseen(skipped) is None


def ends(effects: Sequence[float], margin: float) -> Ends:
    """What trials of good and bad say by the last of LOOKS that they have reached: at ALPHA over all looks
    together. "equal" where the interval is within ± margin and holds 0, or at the last look holds 0."""
    number = max((look for look in LOOKS if look <= len(effects)), default=0)
    if not number:
        return Ends("open", float(np.mean(effects)) if effects else 0.0, -np.inf, np.inf, np.inf)
    seen = np.asarray(effects[:number], np.float64)  # what came since has its own look
    mean, sd = float(seen.mean()), float(seen.std(ddof=1))
    half = float(t_quantile(1 - ALPHA / len(LOOKS) / 2, number - 1)) * sd / number**0.5
    low, high = mean - half, mean + half
    if low > 0 or high < 0:
        return Ends("different", mean, low, high, sd)
    known = number == LOOKS[-1] or max(-low, high) <= margin
    return Ends("equal" if known else "open", mean, low, high, sd)


def posterior(trials: Sequence[Trial], commits: int) -> Posterior:
    """What is known of `commits` commits after good, the last of which is bad, from at least two trials."""
    u = np.array([each.effect for each in trials])
    placed = [each for each in trials if each.commit]
    places = sorted({each.commit for each in placed})
    delta, scale, freedom, weights = _grid(u)
    means = (LEVELS - 0.5) * delta[:, None]
    v = np.array([each.change - each.effect / 2 for each in placed])[:, None, None]
    of_each = _log_t((v - means) / (OF_V * scale[:, None]), freedom[:, None]) - np.log(scale[:, None])
    likelihood = np.zeros((len(delta), len(places), len(LEVELS)))
    for number, place in enumerate(places):
        likelihood[:, number] = of_each[[each.commit == place for each in placed]].sum(axis=0)
    most = likelihood.max(axis=2, keepdims=True, initial=-np.inf) if places else likelihood[:, :, :1]
    weights = weights + most.sum(axis=(1, 2))
    weights = np.exp(weights - weights.max())
    sums = np.zeros((len(delta), len(places) + 1, len(LEVELS)))
    floor = max(FLOOR, LOWEST / max(1, len(places)))
    np.cumsum(np.maximum(likelihood - most, floor), axis=1, out=sums[:, 1:])

    bounds = np.array([0, *places, commits])
    return _changes(sums, weights, bounds, delta, scale * np.sqrt(freedom / (freedom - 2)))


def _grid(u: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """delta, scale and freedom at each point, with the log of its weight from the trials' effects."""
    mean, sd = float(u.mean()), float(u.std(ddof=1))
    sd = max(sd, FINEST * abs(mean), 1e-9)
    axes = np.meshgrid(mean + SHIFTS * sd / len(u) ** 0.5, SCALES * sd, FREEDOMS, indexing="ij")
    delta, scale, freedom = (each.ravel() for each in axes)
    scale = np.maximum(scale, FINEST * abs(mean))
    z = (u[:, None] - delta) / scale
    return delta, scale, freedom, (_log_t(z, freedom) - np.log(scale)).sum(axis=0)


def _log_t(z: Floats, freedom: Floats) -> Floats:
    """Log density of Student's t."""
    from scipy.special import gammaln

    most = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - 0.5 * np.log(freedom * np.pi)
    return np.asarray(most - (freedom + 1) / 2 * np.log1p(z**2 / freedom))


def _changes(
    sums: Floats, weights: Floats, bounds: npt.NDArray[np.int64], delta: Floats, noise: Floats
) -> Posterior:
    """The posterior from `sums`: at each point of the grid, over the measured commits before each gap, the
    log likelihood of each level."""
    gaps = np.diff(bounds).astype(np.float64)
    n, count = int(bounds[-1]), len(gaps)
    prior = [each / comb(n, steps) if n >= steps else 0.0 for steps, each in enumerate(PRIOR, 1)]
    # By gap: as good up to it, and it has so many commits; as bad from it on.
    first = weights[:, None] * gaps * np.exp(sums[:, :, AS_GOOD])
    last = np.exp(sums[:, -1:, AS_BAD] - sums[:, :, AS_BAD])
    # Of a gap and a later one: what speaks for a level between them is a ratio of two that each have one
    # gap, so that sums over points and levels are products of matrices.
    middle = sums[:, -1:] / 2
    rise, fall = np.exp(sums - middle), np.exp(middle - sums)
    neither = NOT_GOOD * NOT_BAD
    last_of = gaps * last

    def over(starts: Floats, stops: Floats) -> Floats:
        """What speaks for each level from a gap on up to a later one: [gap, gap, level]."""
        left = (starts[..., None] * fall).transpose(2, 1, 0)
        return _later(left, (stops[..., None] * rise).transpose(2, 0, 1)).transpose(1, 2, 0)

    def held(levels: Floats) -> Floats:
        """What speaks for these levels together: [point, gap, gap]."""
        return _later(fall * levels, rise.transpose(0, 2, 1))

    good, bad = (held(1.0 * np.equal(LEVELS, each)) for each in (0, 1))
    not_good, not_bad = (held(each / each.sum()) for each in (NOT_GOOD, NOT_BAD))

    single = prior[0] * (first * last).sum(axis=0)
    of_level = prior[1] * neither / neither.sum() * over(first, last_of)
    two = of_level.sum(axis=2)
    # Half of three: it came and went, and came again; half: the first change is the one that stayed.
    began, ends = 0.5 * first[:, :, None] * gaps, last_of[:, None]
    went, again = began * not_good, good * ends
    stayed, back = began * bad, not_bad * ends
    three = prior[2] * (_over_points(went, again) + _over_points(stayed, back))
    of_level += prior[2] * NOT_GOOD / NOT_GOOD.sum() * over(0.5 * first, gaps * again.sum(axis=2))
    of_level += prior[2] * NOT_BAD / NOT_BAD.sum() * over(stayed.sum(axis=1), last_of)
    of_level[..., AS_GOOD] += prior[2] * (went.sum(axis=1)[:, :, None] * again).sum(axis=0)
    of_level[..., AS_BAD] += prior[2] * (stayed * back.sum(axis=2)[:, None]).sum(axis=0)
    total = max(single.sum() + two.sum() + three.sum(), np.finfo(np.float64).tiny)
    single, two, three = single / total, two / total, three / total

    by_gap = single + two.sum(axis=1) + two.sum(axis=0)
    by_gap = by_gap + three.sum(axis=(1, 2)) + three.sum(axis=(0, 2)) + three.sum(axis=(0, 1))
    by_commit = np.concatenate([[0.0], np.repeat(by_gap / gaps, gaps.astype(np.int64))])

    # The level of the measured commits, each of which ends a gap: one that begins in gap a and ends in gap b
    # is that of the commits from a up to b.
    between = of_level / total
    begun, ended = np.cumsum(between.sum(axis=1), axis=0), np.cumsum(between.sum(axis=0), axis=0)
    levels = np.zeros((count + 1, len(LEVELS)))
    levels[1:] = begun - ended
    starts = single + two.sum(axis=1) + three.sum(axis=(1, 2))
    stops = single + two.sum(axis=0) + three.sum(axis=(0, 1))
    levels[:, AS_GOOD] += np.concatenate([[1.0], 1 - np.cumsum(starts)])
    levels[:, AS_BAD] += np.concatenate([[0.0], np.cumsum(stops)])
    places = np.arange(n + 1)
    of_each = np.stack([np.interp(places, bounds, level) for level in levels.T], axis=1)

    best, claim = max(
        (
            (np.unravel_index(int(each.argmax()), each.shape), float(each.max()))
            for each in (single, two, three)
        ),
        key=lambda found: found[1],
    )
    weights = weights / weights.sum()
    return Posterior(
        steps=np.array([single.sum(), two.sum(), three.sum()]),
        commits=by_commit,
        levels=np.clip(of_each, 0, 1),
        bounds=tuple(map(int, bounds)),
        best=tuple((int(bounds[gap]) + 1, int(bounds[gap + 1])) for gap in best),
        claim=claim,
        effect=float(weights @ delta),
        noise=float(weights @ noise),
    )


def _later(left: Floats, right: Floats) -> Floats:
    """Their product, [..., gap, gap], where the second gap is behind the first."""
    with np.errstate(over="ignore"):  # elsewhere
        return np.triu(left @ right, 1)


def _over_points(first: Floats, second: Floats) -> Floats:
    """Sum over points the products of [point, a, b] and [point, b, c], as [a, b, c]."""
    found = np.matmul(first.transpose(2, 1, 0), second.transpose(1, 0, 2))
    return np.asarray(found.transpose(1, 0, 2))


def information(known: Posterior) -> Floats:
    """How much a trial of each commit is expected to tell of its level, in nats; 0 for good and bad."""
    scatter = max(OF_V * known.noise / abs(known.effect), 1e-6) if known.effect else np.inf
    if not np.isfinite(scatter):
        return np.zeros(len(known.levels))
    least, most = LEVELS[0] - 4 * scatter, LEVELS[-1] + 4 * scatter
    outcomes = np.linspace(least, most, max(OUTCOMES, round(2 * (most - least) / scatter)))
    kernel = np.exp(-0.5 * ((outcomes - LEVELS[:, None]) / scatter) ** 2)
    kernel /= kernel.sum(axis=1, keepdims=True)
    mixed = known.levels / known.levels.sum(axis=1, keepdims=True) @ kernel
    noise = -(kernel[AS_GOOD] * np.log(np.maximum(kernel[AS_GOOD], 1e-300))).sum()
    found = -(mixed * np.log(np.maximum(mixed, 1e-300))).sum(axis=1) - noise
    found[[0, -1]] = 0.0
    return np.asarray(np.maximum(found, 0.0), np.float64)


def following(known: Posterior, minutes: Floats, skipped: Collection[int] = ()) -> int | None:
    """The commit to measure next: most expected information for each minute that its trial takes; once one is
    sure, what went unseen. None where there is none to measure."""
    if known.is_sure(skipped):
        return known.unseen(skipped)
    rate = information(known) / minutes
    rate[list(skipped)] = 0.0
    return int(rate.argmax()) if rate.max() > 0 else None


def search(
    trials: Sequence[Trial],
    commits: int,
    measure: Callable[[int], Trial],
    minutes: Floats,
    most: int = MOST_TRIALS,
) -> tuple[list[Trial], Posterior]:
    """Measure commit after commit until one is found, there is none to measure, or `most` trials are done."""
    done = [*trials]
    while True:
        known = posterior(done, commits)
        place = following(known, minutes)
        if known.found() or place is None or len(done) >= len(trials) + most:
            return done, known
        done.append(measure(place))


def forecast(trials: Sequence[Trial], commits: int) -> npt.NDArray[np.int64]:
    """How many more trials finding a commit takes, and of how many different commits: a row for each of
    FORETOLD simulated searches, with the effect and the noise of trials of good and bad."""
    u = np.array([each.effect for each in trials])
    delta, arm = float(u.mean()), float(u.std(ddof=1)) / 2**0.5
    random = np.random.default_rng(commits)
    rows = []
    for changed in random.integers(1, commits + 1, FORETOLD):
        measure = simulated(random, delta * (np.arange(commits + 1) >= changed), arm)
        done, _ = search(trials, commits, measure, np.ones(commits + 1))
        places = [each.commit for each in done[len(trials) :]]
        rows.append((len(places), len(set(places))))
    return np.array(rows)


def simulated(
    random: np.random.Generator, changes: Floats, arm: float, freedom: float = np.inf
) -> Callable[[int], Trial]:
    """Trials of commits that differ from good by these `changes`, with noise of an SD of `arm` in each arm:
    normal, or Student's t."""

    def measure(place: int) -> Trial:
        noise = random.standard_normal(3) if freedom == np.inf else random.standard_t(freedom, 3)
        good, bad, other = arm * noise * (1.0 if freedom == np.inf else (1 - 2 / freedom) ** 0.5)
        effect = float(changes[-1] + bad - good)
        return Trial(place, effect, float(changes[place] + other - good) if place else 0.0)

    return measure
