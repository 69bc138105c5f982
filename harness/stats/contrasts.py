"""What each of several toggles contributes, alone and with the others, from one run of all their settings: a
2^k factorial design. Pure functions; nothing here reads a file.

**Model.** A factor is a toggle with two choices; an arm is one setting of all factors, and boots once in each
block. With y the metric in a block at setting s, and x_A(s) = -1 at the before of factor A, +1 at its after:

    log y(s) = m + 1/2 · sum over the sets T of factors of  effect_T · (product of x_A(s) over A in T) + e(s)

- The effect of {A}, the **main effect**, is the mean over the settings of the others of log(y at A's after /
  y at A's before).
- The effect of {A, B}, the **interaction**, is half the difference between A's effect at B's after and A's
  effect at B's before; so A's effect is A + AB where B is at its after, and A - AB where it is not. Likewise
  half the difference of two interactions for three factors, and so on. The whole difference, 2 AB, is by how
  much both together differ from the sum of what each gives without the other: with two factors, log y(both) -
  log y(A alone) - log y(B alone) + log y(none).

Source: Box, Hunter & Hunter, "Statistics for Experimenters", 2nd ed. 2005, ch. 5, on the log scale, so that
effects multiply and are shown as exp(effect) - 1.

**Interval and test.** An effect is a contrast of one block's arms: m, and whatever else the arms of a block
share, cancels. Each block gives one value, and the t interval is over blocks, as in any comparison.
A main effect of a full design uses every boot: its variance is 4/2^k of a boot's, where a plain pair has 2.

**Families.** Asking for the design declares the main effects and the interactions of two factors on the
primary metric; they carry verdicts at Holm-adjusted levels. Higher interactions, the effect of a factor alone
or with all others, and every other metric are descriptive.

**What a verdict on an interaction says.** Not that a setting became faster or slower, but whether gains add
up. A gain is a change in the direction that is better for the metric (what makes it worse is a gain below
zero).

- `stronger together`: both give more than the sum of what each gives without the other; `weaker together`:
  less. Two factors of -10% each, and -12% for both, are weaker together: 0.88 / 0.90^2 = 1.086, so AB is
  +4.2%.
- `same together`: the interval of the whole difference, 2 AB, lies within the margin.
- `undecided`: neither.

**Settings that are left out** (they mean nothing) leave fewer equations than effects. Effects are taken in by
their order, main effects first, each if it is linearly independent of those before it. The rest are aliased:
they can't be told from a combination of those taken in, and are taken to be zero (effect hierarchy, op. cit.
ch. 6). By least squares, what an estimate then contains besides its own effect is its row of the alias matrix
(X1'X1)^-1 X1'X2 (Box & Wilson, J. R. Stat. Soc. B 1951). Where that row holds an effect of the same order,
neither is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from harness.stats import paired

Floats = NDArray[np.float64]
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


def terms(factors: Sequence[str]) -> list[Term]:
    """Every set of factors, by its size and then by declaration; the empty one is the mean."""
    return [each for size in range(len(factors) + 1) for each in combinations(factors, size)]


def plan(factors: Sequence[str], settings: Floats) -> Plan:
    """What can be estimated from `settings`, float64 [settings, factors] of -1 and +1; see the module."""
    places = {factor: place for place, factor in enumerate(factors)}
    columns = {term: settings[:, [places[each] for each in term]].prod(axis=1) for term in terms(factors)}
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
