"""What is decided about a metric, and why, or why nothing is.

`verdict` is the rule that makes a word of an interval. What takes the word back, besides what is here:
trials without a value (analysis.comparison), turns that are not believed (analysis.turns), a run that is not
finished (analysis.stored), runs that were not interleaved or arms that were not to be compared
(analysis.across_runs)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from overlap_bench.harness.common.formatting import percent
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats.paired import Effect
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.manifest import ChangedCode

Tested = TypeVar("Tested", bound=Hashable)
Word = Literal["same", "faster", "slower", "better", "worse", "undecided"]
CHANGES = ("faster", "slower", "better", "worse")  # the words that say there is a difference


class Verdict(msgspec.Struct, frozen=True):
    """A `word`, and the `reason` for it. Without a word there is no verdict, and the reason says so.
    `overruled_by`: the kind of the warning that took the verdict back; "" none did."""

    word: Word | None
    reason: str = ""
    overruled_by: str = ""

    def __str__(self) -> str:
        """As a sentence says it: "same, within ±1%"."""
        if self.word is None:
            return self.reason or "no verdict"
        return f"{self.word}{': ' if self.overruled_by else ', '}{self.reason}" if self.reason else self.word

    @property
    def stored(self) -> str | None:
        """The word of a metric's row, as files have it: one boot per side is told there too."""
        return str(self) if self == ONE_BOOT else self.word


ONE_BOOT = Verdict("undecided", "one boot per side", "one_boot")  # boots differ: nothing can be said
CONTRADICTED = Verdict("undecided", "other measurements of this run contradict it", "contradicted")
NOT_FINISHED = Verdict(None, "no verdict yet: the run is not finished", "unfinished")
NOT_INTERLEAVED = Verdict(None, "no verdict: the arms were not interleaved", "not_interleaved")
NOT_COMPARED = Verdict(None, "no verdict: the run did not set out to compare these arms", "not_compared")
OFFERED = Verdict(None, "no verdict: this is the load that was offered")
ONE_TRIAL = Verdict(None, "one trial gives no verdict")


def verdict(
    estimate: Effect,
    margin: float,
    better: str,
    is_time: bool,
    p_adjusted: float | None = None,
    alpha: float = ALPHA,
) -> Word | None:
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


def never_ran(why: str) -> Verdict:
    return Verdict(None, f"no verdict: {why}", "never_ran")


def on_declared(
    design: Design,
    effects: Mapping[str, Effect],
    adjusted: Mapping[str, float],
    alpha: float,
    offered: Collection[str],
    contradicted: str | None,
    unused: str | None,
) -> dict[str, Verdict]:
    """The verdict on the primary and on each secondary that has an effect. `adjusted`: p by metric, of those
    that are judged together. `offered`: metrics that are the load. `contradicted`: why turns are not to be
    believed, and so no metric of them; `unused`: why there is nothing to judge."""
    declared = [name for name in dict.fromkeys((design.primary, *design.secondaries)) if name in effects]
    if unused is not None:
        return dict.fromkeys(declared, never_ran(unused))
    found = {}
    for name in declared:
        if name in offered:
            found[name] = OFFERED
        elif any(arm.is_remote for arm in design.arms):
            found[name] = ONE_BOOT
        else:
            found[name] = _by_rule(name, effects[name], design.margin, adjusted.get(name), alpha)
    of_turns = [name for name in declared if contradicted is not None and definitions.METRICS[name].of_turns]
    return {**found, **dict.fromkeys(of_turns, CONTRADICTED)}


def _by_rule(name: str, estimate: Effect, margin: float, p_adjusted: float | None, alpha: float) -> Verdict:
    metric = definitions.METRICS[name]
    word = verdict(estimate, margin, metric.better, metric.is_time, p_adjusted, alpha)
    if word is None or estimate.low is None or estimate.high is None:
        return ONE_TRIAL
    return Verdict(word, reason(word, estimate.change, estimate.low, estimate.high, margin, p_adjusted))


def reason(
    word: str, change: float | None, low: float, high: float, margin: float, p_adjusted: float | None
) -> str:
    """Why the rule comes to that word, by the change with its interval (`change` is None in a unit)."""
    within, sure = f"±{100 * margin:.3g}%", low > 0 or high < 0
    if word == "same":
        return f"within {within}" + (f"; a change of {percent(change)} was detected" if sure else "")
    if word != "undecided":
        return ""
    if sure and p_adjusted is not None:
        return f"p {p_adjusted:.3f} among all comparisons of the run"
    return "the interval holds 0" + ("" if change is None else f" and reaches beyond {within}")


def of_older(found: Mapping[str, Any]) -> Verdict | None:
    """The verdict of a comparison that was stored before reasons were, by what its rule must have seen."""
    row, margin = found["metrics"].get(found["primary"]), found["margin"]
    changed = found.get("changed_code")
    if row is None or found["after"] is None:
        return None
    word, change, low, high = (row[name] for name in ("verdict", "change", "ci_low", "ci_high"))
    if changed and not changed["counts"]:
        return never_ran(msgspec.convert(changed, ChangedCode).never_ran)
    if word == str(ONE_BOOT):
        return ONE_BOOT
    if word is None:
        return ONE_TRIAL if low is None else Verdict(None)
    sure, within = low > 0 or high < 0, change is not None and -margin < low and high < margin
    if word == "undecided" and (within or (sure and row["p_adjusted"] is None)):
        return CONTRADICTED
    return Verdict(word, reason(word, change, low, high, margin, row["p_adjusted"]))
