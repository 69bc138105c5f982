"""Pass, fail or undecided: whether a change costs more than it may.

Let r be how much worse the after arm is, on the log scale of stats.py, and L the largest regression allowed.
Per metric, with one-sided bounds at 95% each:

- **pass** if even the worst case, the upper bound of r, is within L;
- **fail** if even the best case, the lower bound of r, is beyond L;
- **undecided** otherwise: more blocks, or a quieter machine, would tell.

A gate that fails on "significantly above 0" would reject a harmless 1% in 35 to 100% of runs (pair SD 2 to
0.5%, 8 blocks); this one in about none, and it finds 5% in 98% up to a pair SD of 2% (stats.md). All metrics
must pass, which needs no correction: to pass by mistake, a gate must pass the metric that is truly beyond L,
which happens in at most 5%. One failing metric is enough to fail, which does need a correction: the p values
of the fails are Holm-adjusted, so that a change that is within L in every metric fails in at most 5%.
(Berger, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 1982, for the first;
stats.holm for the second.)

Where the run may stop early, the bounds have the levels of its looks, and hold over all of them.

Whatever the metrics say, a gate fails where outputs that must be equal differ. A request that failed is in no
metric, so the share of those has a rule of its own, over blocks like all else: the gate fails where a larger
share failed in the after arm, beyond chance, and does not pass where it could be larger by more than L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from engines import api
from harness import distributions, divergences, metrics, stats
from harness.design import MAX_SECONDARIES, Design

Verdict = Literal["pass", "fail", "undecided"]
DEFAULT_LIMIT = 0.02
MOST_METRICS = MAX_SECONDARIES
ONE_SIDED = 0.05
OFFERED = "is the offered load, whatever the engine does"  # a remark: no verdict, however many blocks


@dataclass(frozen=True, slots=True)
class Judged:
    """One metric. `change` is after/before - 1; the rest is regression, positive where the after arm is
    worse: `best` and `worst` the bounds, `p` of "it is within the limit", adjusted by Holm, and `excludable`
    the smallest regression that as many blocks with this spread rule out in 4 of 5 runs in which nothing
    changed. With one block there are no bounds."""

    before: float
    after: float
    change: float
    best: float | None
    worst: float | None
    p: float | None
    excludable: float | None
    verdict: Verdict
    remark: str = ""


def check(names: Sequence[str], limit: float) -> None:
    """Raises BadSetting where these metrics can't be gated by this limit."""
    for name in names:
        metric = api.pick(name, metrics.METRICS, "metric")
        if metric.can_be_zero or not metric.better:
            raise api.BadSetting(f"{name} has no regression in percent; choose another --metric")
    if len(set(names)) < len(names) or len(names) > MOST_METRICS:
        raise api.BadSetting(f"--metric takes up to {MOST_METRICS} different metrics")
    if not 0 < limit < 1:
        raise api.BadSetting(f"--max-regression must be above 0% and below 100%, not {100 * limit:.4g}%")


def gated(design: Design) -> tuple[str, ...]:
    """The metrics that a run's gate is about."""
    return (design.primary, *(design.secondaries if design.gate is not None else ()))


def level(design: Design, blocks: int) -> float:
    """The one-sided level of the bounds after so many blocks. For a run that may stop early and was planned
    without a gate: half its two-sided level where its rule looks at the mean, which is stricter than 95%
    needs; where the rule looks at the width alone, that level itself for each side."""
    if design.gate is not None:
        return design.gate.levels[_look(design, blocks)]
    if design.until is None:
        return ONE_SIDED
    if design.until.rule == "precise":
        return design.alpha(blocks)
    return design.alpha(blocks) / 2


def _look(design: Design, blocks: int) -> int:
    """Which of the plan's looks has been reached; the first where none has, which is the strictest."""
    looks = design.until.looks if design.until is not None else ()
    return max(0, sum(look <= blocks for look in looks) - 1)


def judge(
    values: Mapping[str, Mapping[str, Sequence[float]]],
    names: Sequence[str],
    limit: float,
    one_sided: float,
    offered: Sequence[str] = (),
) -> dict[str, Judged]:
    """Each metric, from metric → arm → one value per block. `offered`: metrics that are the offered load and
    say nothing of the engine. Raises EngineError where a metric has no value in some block."""
    for name in names:
        if len(values.get(name, {})) < 2:
            raise api.EngineError(f"the metric {name} has no value in some block")
    pairs = {name: (before, after) for name in names for before, after in [values[name].values()]}
    adjusted = stats.holm({name: _p_beyond(name, *pairs[name], limit) for name in names})
    return {
        name: _judge(name, *pairs[name], limit, one_sided, p, name in offered) for name, p in adjusted.items()
    }


def is_gone(name: str, before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a metric that should be high, such as goodput, fell to 0 in every block: that has no ratio."""
    higher = metrics.METRICS[name].better == "higher"
    return higher and min(before) > 0 == max(after)


def overall(judged: Mapping[str, Judged]) -> Verdict:
    """Of the metrics: fail where one fails, pass where all pass."""
    found = {each.verdict for each in judged.values()}
    return "fail" if "fail" in found else "pass" if found == {"pass"} else "undecided"


def _judge(
    name: str,
    before: Sequence[float],
    after: Sequence[float],
    limit: float,
    one_sided: float,
    p: float,
    offered: bool,
) -> Judged:
    if is_gone(name, before, after):
        base = float(np.exp(np.log(before).mean()))
        lost: Verdict = "fail" if p < one_sided else "undecided"
        return Judged(base, 0.0, -1.0, None, None, p, None, lost, "0 in every block of after")
    effect = stats.effect(before, after, "ratio", 2 * one_sided)
    assert effect.change is not None
    if effect.low is None or effect.high is None or effect.sd is None:
        return Judged(
            effect.before, effect.after, effect.change, None, None, None, None, "undecided", "one block"
        )
    lower = metrics.METRICS[name].better == "lower"
    best, worst = (effect.low, effect.high) if lower else (-effect.high, -effect.low)
    shift = stats.smallest_detectable(effect.sd, effect.blocks, alpha=2 * one_sided)
    excludable = float(np.expm1(shift) if lower else -np.expm1(-shift))
    verdict: Verdict = "undecided"
    if worst <= limit:
        verdict = "pass"
    elif p < one_sided:
        verdict = "fail"
    remark = ""
    if offered:
        verdict, remark = "undecided", OFFERED
    return Judged(effect.before, effect.after, effect.change, best, worst, p, excludable, verdict, remark)


def _p_beyond(name: str, before: Sequence[float], after: Sequence[float], limit: float) -> float:
    """One-sided p of "the regression is within the limit"; 1 with a single block. Where nothing is left
    there is no mean to test, so it is a sign test: all blocks are beyond the limit, where half would be."""
    if is_gone(name, before, after):
        return float(0.5 ** len(before))
    lower = metrics.METRICS[name].better == "lower"
    worse = stats.paired(before, after, "ratio") * (1 if lower else -1)
    beyond = worse - (np.log1p(limit) if lower else -np.log1p(-limit))
    n, mean = len(beyond), float(beyond.mean())
    if n < 2:
        return 1.0
    sd = float(beyond.std(ddof=1))
    if sd == 0:
        return 0.0 if mean > 0 else 1.0
    return float(distributions.t_tail(mean / (sd / n**0.5), n - 1))


def more_failed(before: Sequence[float], after: Sequence[float], limit: float, level: float) -> Verdict:
    """Whether a larger share of the requests fails in the after arm, from the shares by block: "fail" where a
    one-sided t test at `level` says so, "pass" where its bound on the difference is within the limit."""
    differences = np.subtract(after, before)
    n, mean = len(differences), float(differences.mean())
    sd = float(differences.std(ddof=1)) if n > 1 else 0.0
    if sd == 0:  # the same in every block: the sign test, since a few failures can come to that by chance
        p, worst = (0.5**n if mean > 0 else 1.0), mean
    else:
        error = sd / n**0.5
        p = float(distributions.t_tail(mean / error, n - 1))
        worst = mean + float(distributions.t_quantile(1 - level, n - 1)) * error
    return "fail" if p < level else "pass" if worst <= limit else "undecided"


def as_plain(
    judged: Mapping[str, Judged],
    limit: float,
    one_sided: float,
    comparison: Mapping[str, Any],
    promised: bool,
    failing: Verdict,
) -> dict[str, Any]:
    """The gate's part of `--format json`: `verdict` is the last word, `confidence` that of each one-sided
    bound. `faults` fail it whatever the metrics say, `doubts` keep it from passing: `failing` is what
    more_failed says, `promised` as in divergences.fails."""
    outputs = comparison["outputs"]
    differ = [divergences.conclusion(outputs).rstrip(".")] if divergences.fails(outputs, promised) else []
    faults = differ + (_failures(comparison) if failing == "fail" else [])
    doubts = [
        f"{each}: too few blocks to tell it from chance"
        for each in _failures(comparison)
        if failing == "undecided"
    ]
    said = overall(judged)
    return {
        "verdict": "fail" if faults else "undecided" if doubts and said == "pass" else said,
        "faults": faults,
        "doubts": doubts,
        "max_regression": limit,
        "confidence": 1 - one_sided,
        "metrics": {name: asdict(each) for name, each in judged.items()},
    }


def _failures(comparison: Mapping[str, Any]) -> list[str]:
    (before, old), (after, new) = comparison["failures"].items()
    return [
        f"{new['failed']} of {new['requests']} requests failed in {after}, "
        f"{old['failed']} of {old['requests']} in {before}"
    ]


def benchmark(result: Mapping[str, Any], better: str) -> list[dict[str, Any]]:
    """What github-action-benchmark reads as customSmallerIsBetter (`better` "lower") or customBiggerIsBetter
    ("higher"): the after arm's value of each gated metric that is better that way."""
    comparison, found = result["comparisons"][0], result["gate"]
    besides = "".join(f"; {each}: {found['verdict']}" for each in (*found["faults"], *found["doubts"]))
    rows = []
    for name, each in found["metrics"].items():
        metric = metrics.METRICS[name]
        if metric.better != better:
            continue
        row = comparison["metrics"][name]
        half = None if row["ci_low"] is None else (row["ci_high"] - row["ci_low"]) / 2
        rows.append(
            {
                "name": f"{comparison['variant']}: {name}",
                "unit": metric.unit,
                "value": each["after"],
                "range": "" if half is None else f"± {half:.2%}",
                "extra": f"base {each['before']:.4g} {metric.unit}, change {each['change']:+.2%}, "
                f"{each['verdict']} (at most {100 * found['max_regression']:.3g}%){besides}",
            }
        )
    return rows
