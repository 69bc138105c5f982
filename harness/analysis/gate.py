"""Pass, fail or undecided: whether a change costs more than it may. The rule with its rates: stats.md, A
gate.

Let r be how much worse the after arm is, on the log scale of stats/paired.py, and L the largest regression
allowed. Per metric, with one-sided bounds: **pass** if the upper bound of r is within L, **fail** if the
lower bound is beyond it (by Holm-adjusted p), else **undecided**. All metrics must pass, which needs no
correction (Berger, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 1982). Where
the run may stop early, the bounds have the levels of its looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb

import msgspec
import numpy as np

from overlap_bench.harness.analysis import decision
from overlap_bench.harness.analysis.result import Comparison, GateResult, GateVerdict, Judged
from overlap_bench.harness.analysis.words import outputs_that_differ
from overlap_bench.harness.common.formatting import share
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import DEFAULT_LIMIT, ONE_SIDED, Design
from overlap_bench.harness.stats import paired, planning
from overlap_bench.harness.stats.distributions import t_quantile, t_tail

MOST = 100  # blocks that anybody would wait for
ROUNDING = 1e-12  # by which equal shares of failed requests may differ
CHOSEN_LATE = (
    "whatever is chosen once the numbers are there gives no test at 5%, so measure afresh with the latter"
)
OFFERED = "is the offered load, whatever the engine does"  # a remark: no verdict, however many blocks


def judge(
    values: Mapping[str, Mapping[str, Sequence[float]]],
    names: Sequence[str],
    limit: float,
    one_sided: float,
    offered: Sequence[str] = (),
) -> dict[str, Judged]:
    """Each metric, from metric → arm → one value per block. `offered`: metrics that are the offered load and
    say nothing of the engine."""
    pairs = {name: (before, after) for name in names for before, after in [values[name].values()]}
    adjusted = decision.holm({name: _p_beyond(name, *pairs[name], limit) for name in names})
    return {
        name: _judge(name, *pairs[name], limit, one_sided, len(names), p, name in offered)
        for name, p in adjusted.items()
    }


def is_gone(name: str, before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether a metric that should be high, such as goodput, fell to 0 in some block: that has no ratio."""
    higher = definitions.METRICS[name].better == "higher"
    return higher and min(before) > 0 == min(after)


def overall(judged: Mapping[str, Judged]) -> GateVerdict:
    """The verdict of all metrics: fail where one fails, pass where all pass."""
    found = {each.verdict for each in judged.values()}
    return "fail" if "fail" in found else "pass" if found == {"pass"} else "undecided"


def _judge(
    name: str,
    before: Sequence[float],
    after: Sequence[float],
    limit: float,
    one_sided: float,
    metrics: int,
    p: float,
    offered: bool,
) -> Judged:
    """One of so many `metrics`, the first of which fails at the level that Holm leaves for each of them."""
    if is_gone(name, before, after):
        base, left = float(np.exp(np.log(before).mean())), float(np.mean(after))
        lost: GateVerdict = "fail" if p < one_sided else "undecided"
        where = "some trials" if left else "every trial"
        return Judged(
            before=base,
            after=left,
            change=left / base - 1,
            p=p,
            verdict=lost,
            remark=f"0 in {where} of after",
        )
    effect = paired.effect(before, after, "ratio", 2 * one_sided)
    assert effect.change is not None
    found = Judged(
        before=effect.before,
        after=effect.after,
        change=effect.change,
        verdict="undecided",
        remark=OFFERED if offered else "",
    )
    if effect.low is None or effect.high is None or effect.sd is None:
        return msgspec.structs.replace(found, remark="one trial")
    lower = definitions.METRICS[name].better == "lower"
    best, worst = _bounds(effect, lower)
    surely, _ = _bounds(paired.effect(before, after, "ratio", 2 * one_sided / metrics), lower)
    shift = planning.smallest_detectable(effect.sd, effect.blocks, alpha=2 * one_sided)
    excludable = float(np.expm1(shift) if lower else -np.expm1(-shift))
    found = msgspec.structs.replace(
        found, best=best, worst=worst, p=p, excludable=excludable, fails_to=surely if surely > 0 else None
    )
    if offered:
        return found
    if worst <= limit or p < one_sided:
        return msgspec.structs.replace(found, verdict="pass" if worst <= limit else "fail")
    beyond = float(_beyond(name, before, after, limit).mean())
    level = ONE_SIDED / metrics  # of a gate of a fixed number
    more = planning.blocks_to_decide(abs(beyond), effect.sd, effect.blocks, level, MOST)
    return msgspec.structs.replace(found, more_blocks=more)


def _bounds(effect: paired.Effect, lower: bool) -> tuple[float, float]:
    """The regression at best, and at worst."""
    assert effect.low is not None
    assert effect.high is not None
    return (effect.low, effect.high) if lower else (-effect.high, -effect.low)


def _beyond(name: str, before: Sequence[float], after: Sequence[float], limit: float) -> paired.Differences:
    """How far each block is beyond the limit, on the log scale."""
    lower = definitions.METRICS[name].better == "lower"
    worse = paired.paired(before, after, "ratio") * (1 if lower else -1)
    return np.subtract(worse, np.log1p(limit) if lower else -np.log1p(-limit))


def _p_beyond(name: str, before: Sequence[float], after: Sequence[float], limit: float) -> float:
    """One-sided p of "the regression is within the limit"; 1 with a single block. Where nothing is left
    there is no mean of ratios to test, so it is a sign test: half of the blocks may be beyond the limit."""
    if is_gone(name, before, after):
        n, lost = len(before), sum(new < (1 - limit) * old for old, new in zip(before, after, strict=True))
        return float(sum(comb(n, k) for k in range(lost, n + 1)) / 2**n)
    beyond = _beyond(name, before, after, limit)
    n, mean = len(beyond), float(beyond.mean())
    if n < 2:
        return 1.0
    sd = float(beyond.std(ddof=1))
    if sd == 0:
        return 0.0 if mean > 0 else 1.0
    return float(t_tail(mean / (sd / n**0.5), n - 1))


def more_failed(before: Sequence[float], after: Sequence[float], limit: float, level: float) -> GateVerdict:
    """Whether a larger share of the requests fails in the after arm, from the shares by block: "fail" where a
    one-sided t test at `level` says so, "pass" where its bound on the difference is within the limit."""
    differences = np.subtract(after, before)
    n, mean = len(differences), float(differences.mean())
    sd = float(differences.std(ddof=1)) if n > 1 else 0.0
    # The same in every block: the sign test, since a few failures can come to that by chance.
    if np.ptp(differences) < ROUNDING:
        p, worst = (0.5**n if mean > 0 else 1.0), mean
    else:
        error = sd / n**0.5
        p = float(t_tail(mean / error, n - 1))
        worst = mean + float(t_quantile(1 - level, n - 1)) * error
    return "fail" if p < level else "pass" if worst <= limit else "undecided"


def result_of(
    judged: Mapping[str, Judged],
    limit: float,
    one_sided: float,
    comparison: Comparison,
    promised: bool,
    failing: GateVerdict,
    apart: str | None = None,
    unplanned: Sequence[str] = (),
    seconds: float | None = None,
    believed: Mapping[str, Judged] | None = None,
) -> GateResult:
    """What a gate says in the end. `failing` is what more_failed says, `promised` as in Outputs.fail, `apart`
    why some metrics can't be believed, as those of turns, and `believed` those that can all the same;
    `seconds`: what a block took."""
    (before, old), (after, new) = comparison.failures.items()
    failed = (
        f"{new.failed} of {new.requests} requests failed in {after}, "
        f"{old.failed} of {old.requests} in {before}"
    )
    outputs = comparison.outputs
    faults = [outputs_that_differ(outputs).rstrip(".")] if outputs.fail(promised) else []
    faults += [failed] if failing == "fail" else []
    doubts = [f"{failed}: too few trials to tell it from chance"] if failing == "undecided" else []
    doubts += [] if apart is None else [apart]
    said = overall(judged)
    sure = bool(faults) or overall(believed or {}) == "fail"
    worst = [None if each.remark == OFFERED else each.worst for each in judged.values()]
    failed_to = [
        each.fails_to for each in judged.values() if each.fails_to is not None and each.remark != OFFERED
    ]
    return GateResult(
        verdict="fail" if sure else "undecided" if apart or (doubts and said == "pass") else said,
        faults=faults,
        doubts=doubts,
        unplanned=list(unplanned),
        max_regression=limit,
        confidence=1 - one_sided,
        passes_from=None if None in worst else max(each for each in worst if each is not None),
        fails_to=max(failed_to, default=None),
        seconds_per_block=seconds,
        metrics=dict(judged),
    )


def unplanned(design: Design, names: Sequence[str], limit: float) -> list[str]:
    """What a run is judged by here that was not declared before its first block: a limit that somebody chose
    with the numbers before them gives no test at its level."""
    declared = design.gated
    planned = DEFAULT_LIMIT if design.gate is None else design.gate.max_regression
    found = []
    if planned != limit:
        measured = "without a gate" if design.gate is None else f"for a limit of {share(planned)}"
        found.append(f"the run was measured {measured}, and is judged by a limit of {share(limit)}")
    if {*names} != {*declared}:
        found.append(f"the run was measured for {', '.join(declared)}, and is judged by {', '.join(names)}")
    if found and design.until is not None:
        found.append("it ended when its stopping rule had enough for the former")
    return [*found, CHOSEN_LATE] if found else []


def doubted(found: GateResult, doubts: Iterable[str]) -> GateResult:
    """What a gate says where these keep it from passing, besides those that it has."""
    more = [*found.doubts, *doubts]
    verdict: GateVerdict = "undecided" if more and found.verdict == "pass" else found.verdict
    return msgspec.structs.replace(found, doubts=more, verdict=verdict)


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """What github-action-benchmark reads."""

    name: str
    unit: str
    value: float
    range: str
    extra: str


def benchmark(comparison: Comparison, found: GateResult, better: str) -> list[Benchmark]:
    """For customSmallerIsBetter (`better` "lower") or customBiggerIsBetter ("higher"): the after arm's value
    of each gated metric that is better that way."""
    besides = "".join(f"; {each}: {found.verdict}" for each in (*found.faults, *found.doubts))
    rows = []
    for name, each in found.metrics.items():
        metric = definitions.METRICS[name]
        if metric.better != better:
            continue
        row = comparison.metrics[name]
        spread = ""  # what fell to 0 has an interval in its unit, and none in percent
        if row.change is not None and row.ci_low is not None and row.ci_high is not None:
            spread = f"± {(row.ci_high - row.ci_low) / 2:.2%}"
        rows.append(
            Benchmark(
                name=f"{comparison.variant}: {name}",
                unit=metric.unit,
                value=each.after,
                range=spread,
                extra=f"base {each.before:.4g} {metric.unit}, change {each.change:+.2%}, "
                f"{each.verdict} (at most {100 * found.max_regression:.3g}%){besides}",
            )
        )
    return rows
