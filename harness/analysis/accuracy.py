"""From the answers of both arms to what is said of them: pure functions.

The arms answer the same items, so their difference is paired. It has two readings. For these very items it is
exact, and so is the number of items that differ. For the task, of which they are a sample, it has an
interval: Tango's where an item is right or wrong, and the t interval of the paired differences where it is
scored otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.analysis.result import Settings
from overlap_bench.harness.analysis.warnings import Kind, Severity, Warning
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import ALPHA

# How far log-likelihoods of one arm may be from the other's, in natural logarithms per token: in fp32 another
# order of summation (another batch) makes 1e-5.
APART = 1e-3


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What a model makes of one continuation: log-probability, natural; whether greedy decoding would give
    it; its tokens."""

    logprob: float
    greedy: bool
    tokens: int

    @classmethod
    def of(cls, scores: Sequence[api.Score]) -> Likelihood:
        return cls(sum(each.logprob for each in scores), all(each.greedy for each in scores), len(scores))


@dataclass(slots=True)
class Answers:
    """All that one arm said, in the order in which it was asked. `cut`: requests whose context was too long,
    and was cut on the left."""

    likelihoods: list[Likelihood] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cut: int = 0


class Row(msgspec.Struct, frozen=True):
    """One metric of one task. `delta` = after − before, with its interval at 95%; `differ`: items whose value
    changed. With one arm alone, all from `after` on is None."""

    task: str
    metric: str
    items: int
    before: float
    after: float | None = None
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    differ: int | None = None


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How far apart the arms' answers are, one by one; what compares is None for one arm alone."""

    loglikelihoods: int
    apart: int | None = None  # by more than APART a token
    largest_difference: float | None = None  # per token
    greedy_differ: int | None = None
    texts: int
    texts_differ: int | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`tasks` has what was asked for first, a group as one, and then every task of a group."""

    schema_version: int
    run: str
    device: str
    variant: str
    before: Settings
    after: Settings | None
    confidence: float
    tasks: list[Row]
    answers: Agreement
    warnings: list[Warning]


class Cut(Kind, frozen=True):
    cut: int
    asked: int
    context: int
    usual = Severity.QUALIFIES
    says = (
        "{cut} of {asked} requests were longer than max_context={context} and were cut on "
        "the left; the model saw less than the task holds, so accuracy is too low; give --set max_context=N"
    )


class AnswersMayDiffer(Kind, frozen=True):
    says = (
        "equal answers are not promised: in half precision, or on a GPU, the batch can change a token; so "
        "answers that differ fail nothing here; judge by the change in accuracy and its interval"
    )


def row(task: str, metric: str, before: Sequence[float], after: Sequence[float] | None) -> Row:
    """The row of values per item, the same items in the same order."""
    first = np.asarray(before, np.float64)
    if after is None:
        return Row(task, metric, len(first), float(first.mean()))
    second = np.asarray(after, np.float64)
    differences = second - first
    low = high = p = None
    if np.isin([first, second], (0, 1)).all():
        gained, lost = (int(np.count_nonzero(differences == sign)) for sign in (1, -1))
        low, high = tango(gained, lost, len(first))
        p = mcnemar(gained, lost)
    elif np.isfinite(differences).all():
        effect = paired.effect(before, after, "difference")
        low, high, p = effect.low, effect.high, effect.p
    one, other, delta = (float(each.mean()) for each in (first, second, differences))
    differ = int(np.count_nonzero(differences))
    return Row(task, metric, len(first), one, other, delta, low, high, p, differ)


def tango(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Interval of a paired difference of proportions, (gained - lost) / n: the differences that a score test
    does not reject. It keeps its level where few items differ, and has a width where none does.

    Source: Tango, "Equivalence test and confidence interval for the difference in proportions for the
    paired-sample design", Statistics in Medicine 1998.
    """
    z = NormalDist().inv_cdf(1 - ALPHA / 2)
    estimate = (gained - lost) / n

    def score(delta: float) -> float:
        a, b, c = 2 * n, -gained - lost + (2 * n - gained + lost) * delta, -lost * delta * (1 - delta)
        share = ((max(0.0, b * b - 4 * a * c)) ** 0.5 - b) / (2 * a)
        variance = n * (2 * share + delta * (1 - delta))
        return (gained - lost - n * delta) / variance**0.5 if variance > 0 else float("nan")

    return _edge(score, z, -1.0, estimate), _edge(score, -z, estimate, 1.0)


def _edge(score: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the score, which decreases, crosses the target between these; the outer end where it does not."""
    tiny = 1e-12
    inner, outer = (high - tiny, low + tiny) if target > 0 else (low + tiny, high - tiny)
    if not min(low, high) + 2 * tiny < max(low, high):
        return low if target > 0 else high
    values = score(inner) - target, score(outer) - target
    if np.isnan(values).any() or values[0] * values[1] > 0:
        return low if target > 0 else high
    from scipy import optimize  # as below: it takes time to import, and every command knows an Evaluation

    return float(optimize.brentq(lambda delta: score(delta) - target, min(inner, outer), max(inner, outer)))


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p of "an item is as easily gained as lost": a sign test of those that differ."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def agreement(before: Answers, after: Answers | None) -> Agreement:
    if after is None:
        return Agreement(loglikelihoods=len(before.likelihoods), texts=len(before.texts))
    pairs = list(zip(before.likelihoods, after.likelihoods, strict=True))
    gaps = [abs(one.logprob - other.logprob) / max(1, one.tokens) for one, other in pairs]
    return Agreement(
        loglikelihoods=len(before.likelihoods),
        apart=sum(not gap <= APART for gap in gaps),  # NaN counts as apart
        largest_difference=max(gaps, default=0.0),
        greedy_differ=sum(one.greedy != other.greedy for one, other in pairs),
        texts=len(before.texts),
        texts_differ=sum(one != other for one, other in zip(before.texts, after.texts, strict=True)),
    )


def pooled(values: Mapping[str, Sequence[float]], tasks: Iterable[str]) -> list[float]:
    return [value for task in tasks for value in values[task]]
