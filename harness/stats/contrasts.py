"""What each of several toggles contributes, alone and with the others, from one run of all their settings: a
2^k factorial design. Families, and what a verdict on an interaction says: stats.md, Several arms.

Model, with y the metric in a block at setting s, and x_A(s) = -1 at the before of toggle A, +1 at its after:

    log y(s) = m + 1/2 · sum over the sets T of toggles of  effect_T · (product of x_A(s) over A in T) + e(s)

The effect of {A} is the mean, over the settings of the others, of log(y at A's after / y at A's before).
That of {A, B} is half the difference of A's effect between B's after and B's before: two toggles of -10% each
and -12% for both have 0.88 / 0.90² = 1.086, the whole difference 2 AB, so AB is +4.2%. Each effect is one
number per block, with a t interval over blocks.

Source: Box, Hunter & Hunter, "Statistics for Experimenters", 2nd ed. 2005, ch. 5, on the log scale; ch. 6 for
settings that are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.distributions import Floats

Term = tuple[str, ...]  # the factors of an effect, in the order of their declaration
NOTHING = 1e-9  # an alias up to this is zero but for rounding


@dataclass(frozen=True, slots=True)
class Contrast:
    """How an effect is made: the sum over settings of weight · log y. `assumes`: effects of a higher order
    that would be in it, and are taken to be zero."""

    term: Term
    weights: Floats
    assumes: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Which effects the settings of a design can tell apart. `aliased`: the others, each with the effects
    that it can't be told from."""

    contrasts: tuple[Contrast, ...]
    aliased: Mapping[Term, tuple[Term, ...]]


def plan(factors: Sequence[str], settings: Floats) -> Plan:
    """What can be estimated from `settings`, float64 [settings, factors] of -1 and +1: an effect is taken in
    if it is linearly independent of those before it. By least squares, what an estimate then contains besides
    its own effect is its row of the alias matrix (X1'X1)^-1 X1'X2 (Box & Wilson, J. R. Stat. Soc. B 1951);
    where that row holds an effect of the same order, neither is given."""
    places = {factor: place for place, factor in enumerate(factors)}
    columns = {  # of every set of factors, by its size and then by declaration; the empty one is the mean
        term: settings[:, [places[each] for each in term]].prod(axis=1)
        for size in range(len(factors) + 1)
        for term in combinations(factors, size)
    }
    taken: list[Term] = []
    for term in columns:
        if np.linalg.matrix_rank(_matrix(columns, [*taken, term])) > len(taken):
            taken.append(term)
    rest = [term for term in columns if term not in taken]
    inverse = np.linalg.pinv(_matrix(columns, taken))
    alias = inverse @ _matrix(columns, rest) if rest else np.zeros((len(taken), 0))
    inside = {
        term: tuple(other for other, share in zip(rest, row, strict=True) if abs(share) > NOTHING)
        for term, row in zip(taken, alias, strict=True)
    }
    mixed = {term for term, others in inside.items() if any(len(each) <= len(term) for each in others)}
    contrasts = tuple(
        Contrast(term, 2 * row, inside[term])
        for term, row in zip(taken, inverse, strict=True)
        if term and term not in mixed
    )
    aliased = {other: tuple(term for term in taken if term and other in inside[term]) for other in rest}
    aliased |= {term: inside[term] for term in mixed if term}
    return Plan(contrasts, aliased)


def label(term: Sequence[str]) -> str:
    """ "h2d", "h2d × output"."""
    return " × ".join(term)


def _matrix(columns: Mapping[Term, Floats], chosen: Sequence[Term]) -> Floats:
    return np.stack([columns[term] for term in chosen], axis=1)


def between(settings: Floats, before: Floats, after: Floats) -> Floats | None:
    """The contrast of one setting with another; None where one of them was left out."""
    weights = np.zeros(len(settings))
    for wanted, weight in ((after, 1.0), (before, -1.0)):
        found = np.flatnonzero((settings == wanted).all(axis=1))
        if not len(found):
            return None
        weights[found[0]] += weight
    return weights


def alone(settings: Floats, factor: int) -> Floats | None:
    """From every factor at its before, to this one at its after."""
    before = -np.ones(settings.shape[1])
    return between(settings, before, _turned(before, factor))


def with_others(settings: Floats, factor: int) -> Floats | None:
    """From every other factor at its after, to this one as well."""
    after = np.ones(settings.shape[1])
    return between(settings, _turned(after, factor), after)


def together(settings: Floats) -> Floats | None:
    """From every factor at its before, to every factor at its after."""
    after = np.ones(settings.shape[1])
    return between(settings, -after, after)


def _turned(corner: Floats, factor: int) -> Floats:
    turned = corner.copy()
    turned[factor] = -turned[factor]
    return turned


def estimate(values: Floats, weights: Floats) -> paired.Effect:
    """The effect of a contrast from `values`, positive, float64 [blocks, settings]: mean, t interval and test
    of one number per block."""
    contrasts = np.log(values) @ weights
    return paired.effect(np.ones(len(contrasts)).tolist(), np.exp(contrasts).tolist(), "ratio")
