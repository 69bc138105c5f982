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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import metrics, stats
from harness.design import Arm, Factor

Floats = NDArray[np.float64]
Term = tuple[str, ...]  # the factors of an effect, in the order of their declaration
JUDGED_ORDER = 2  # up to here an effect of the primary carries a verdict
TOGETHER = {"better": "stronger together", "worse": "weaker together", "same": "same together"}
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


def levels(factors: Sequence[Factor], arms: Sequence[Arm]) -> Floats:
    """-1 for the before and +1 for the after: float64 [arms, factors]."""
    return np.array(
        [[1.0 if arm.toggles[each.toggle] == each.after else -1.0 for each in factors] for arm in arms]
    )


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


def declared(factors: Sequence[Factor], arms: Sequence[Arm]) -> list[Contrast]:
    """The effects that carry verdicts on the primary."""
    planned = plan([each.toggle for each in factors], levels(factors, arms))
    return [each for each in planned.contrasts if len(each.term) <= JUDGED_ORDER]


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


def estimate(values: Floats, weights: Floats) -> stats.Effect:
    """The effect of a contrast from `values`, positive, float64 [blocks, settings]: mean, t interval and test
    of one number per block."""
    contrasts = np.log(values) @ weights
    return stats.effect(np.ones(len(contrasts)).tolist(), np.exp(contrasts).tolist(), "ratio")


def judge(
    contrast: Contrast, values: Floats, margin: float, kind: metrics.Metric, p_adjusted: float
) -> str | None:
    """The verdict on an effect on a metric of that kind: for one factor that of stats.verdict; for more of
    them whether their gains add up (see the module), judged by the whole difference, not by half of it. None
    with fewer than two blocks."""
    if len(contrast.term) == 1:
        effect = estimate(values, contrast.weights)
        return stats.verdict(effect, margin, kind.better, kind.is_time, p_adjusted)
    whole = estimate(values, 2 * contrast.weights)
    found = stats.verdict(whole, margin, kind.better, is_time=False, p_adjusted=p_adjusted)
    return TOGETHER.get(found, found) if found is not None else None


# ---------------------------------------------------------------------------------------------------------
# As it stands in a result


def analyse(
    factors: Sequence[Factor],
    arms: Sequence[Arm],
    values: Mapping[str, Mapping[str, Sequence[float]]],
    primary: str,
    margin: float,
) -> dict[str, Any]:
    """Every effect on every metric that is positive in each block of each arm. `values`: metric → arm → one
    value per block.

    {"factors": [{"toggle", "before", "after"}], "settings": {arm: {toggle: choice}}, "aliased": [{"effect",
    "with"}], "metrics": {metric: {"unit", "better", "settings": {arm: geometric mean over blocks}, "effects":
    [row], "alone": {toggle: row}, "with_others": {toggle: row}, "together": row}}}. A row has effect (the
    toggles), change, ci_low, ci_high (fractions), sd, p, p_adjusted, verdict, and assumes; it is null where
    a setting that it needs was left out.
    """
    names = [each.toggle for each in factors]
    settings = levels(factors, arms)
    planned = plan(names, settings)
    found: dict[str, Any] = {}
    for metric, per_arm in values.items():
        blocks = np.array([per_arm[arm.name] for arm in arms if arm.name in per_arm]).T
        if blocks.shape[-1] != len(arms) or not (blocks > 0).all() or metrics.METRICS[metric].can_be_zero:
            continue
        found[metric] = {
            "unit": metrics.METRICS[metric].unit,
            "better": metrics.METRICS[metric].better,
            "settings": {
                arm.name: float(np.exp(np.log(column).mean()))
                for arm, column in zip(arms, blocks.T, strict=True)
            },
            "effects": _effects(planned, blocks, metric, margin if metric == primary else None),
            "alone": {name: _row([name], alone(settings, place), blocks) for place, name in enumerate(names)},
            "with_others": {
                name: _row([name], with_others(settings, place), blocks) for place, name in enumerate(names)
            },
            "together": _row(names, together(settings), blocks),
        }
    return {
        "factors": [{"toggle": each.toggle, "before": each.before, "after": each.after} for each in factors],
        "settings": {arm.name: {name: arm.toggles[name] for name in names} for arm in arms},
        "aliased": [
            {"effect": list(term), "with": [list(each) for each in others]}
            for term, others in planned.aliased.items()
        ],
        "metrics": found,
    }


def _effects(planned: Plan, values: Floats, metric: str, margin: float | None) -> list[dict[str, Any]]:
    """Main effects and interactions; with verdicts where there is a margin."""
    effects = {each.term: estimate(values, each.weights) for each in planned.contrasts}
    family = {
        term: effect.p
        for term, effect in effects.items()
        if margin is not None and len(term) <= JUDGED_ORDER and effect.p is not None
    }
    adjusted = stats.holm(family)
    kind = metrics.METRICS[metric]
    rows = []
    for each in planned.contrasts:
        row = _as_row(each.term, effects[each.term])
        row["assumes"] = [list(other) for other in each.assumes]
        if margin is not None and each.term in adjusted:
            p = adjusted[each.term]
            row |= {"p_adjusted": p, "verdict": judge(each, values, margin, kind, p)}
        rows.append(row)
    return rows


def _row(term: Sequence[str], weights: Floats | None, values: Floats) -> dict[str, Any] | None:
    return None if weights is None else _as_row(term, estimate(values, weights))


def _as_row(term: Sequence[str], effect: stats.Effect) -> dict[str, Any]:
    return {
        "effect": list(term),
        "change": effect.change,
        "ci_low": effect.low,
        "ci_high": effect.high,
        "sd": effect.sd,
        "p": effect.p,
        "p_adjusted": None,
        "verdict": None,
        "assumes": [],
    }
