"""What each of several toggles contributes, as it stands in a result; the method: stats.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from overlap_bench.harness.analysis import decision, turns
from overlap_bench.harness.analysis.arm_warnings import circumstances
from overlap_bench.harness.analysis.decision import CONTRADICTED, OFFERED, Verdict
from overlap_bench.harness.analysis.result import (
    Aliased,
    Comparison,
    Effect,
    Effects,
    FactorialResult,
)
from overlap_bench.harness.analysis.values import (
    THROUGHPUTS,
    Series,
    check_values,
    counted,
    measured,
    offered_load,
)
from overlap_bench.harness.analysis.verdict_warnings import (
    Contradicted,
    LeftOut,
    NodesDisagreeAbout,
    few_trials,
    of_order_of_factorial,
)
from overlap_bench.harness.analysis.warnings import Warning, ranked
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Design, Factorial
from overlap_bench.harness.plan.factors import levels
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.contrasts import (
    Contrast,
    Plan,
    alone,
    estimate,
    label,
    plan,
    together,
    with_others,
)
from overlap_bench.harness.stats.distributions import Floats
from overlap_bench.harness.stats.nodes import agreement, of_nodes
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block

JUDGED_ORDER = 2  # up to here an effect of the primary carries a verdict
TOGETHER = {"better": "stronger together", "worse": "weaker together", "same": "same together"}


def judge(
    contrast: Contrast, values: Floats, margin: float, kind: definitions.Metric, p_adjusted: float
) -> str | None:
    """The verdict on an effect on a metric of that kind: for one factor that of stats.verdict; for more of
    them whether their gains add up (see the module), judged by the whole difference, not by half of it. None
    with fewer than two blocks."""
    if len(contrast.term) == 1:
        effect = estimate(values, contrast.weights)
        return decision.verdict(effect, margin, kind.better, kind.is_time, p_adjusted)
    whole = estimate(values, 2 * contrast.weights)
    found = decision.verdict(whole, margin, kind.better, is_time=False, p_adjusted=p_adjusted)
    return TOGETHER.get(found, found) if found is not None else None


def of_run(
    manifest: Manifest,
    planned: Factorial,
    blocks: Sequence[Block],
    per_block: Sequence[Values],
    compared: Sequence[Comparison],
) -> FactorialResult:
    """What a run of these factors found, by the blocks that decide, with what is to be said of it. Where one
    of its comparisons (`compared`) does not believe turns, no effect is judged by them."""
    design = manifest.design
    deciding = counted(design, per_block, design.gated)
    doubts = [each for one in compared for each in one.warnings if isinstance(each, Contradicted)][:1]
    left_out = [LeftOut(len(blocks) - len(deciding), len(blocks))] if len(deciding) < len(blocks) else []
    blocks, per_block = [blocks[each] for each in deciding], [per_block[each] for each in deciding]
    check_values(design, per_block, [design.primary], ratio=True)
    if not doubts and design.primary in definitions.OF_PAIRS and (why := turns.disturbed(per_block)):
        doubts = [Contradicted(why)]  # an arm's trials may be too few to leave out, and no pair's are
    values = measured(design, per_block)
    nodes = [block.node for block in blocks]
    contrasts = plan([each.toggle for each in planned.factors], levels(planned.factors, design.arms))
    judged = {
        label(each.term): each.weights for each in contrasts.contrasts if len(each.term) <= JUDGED_ORDER
    }
    told = [
        *doubts,
        *left_out,
        *few_trials(design, len(blocks)),
        *of_order_of_factorial(manifest, [block.number for block in blocks], values, judged),
        *circumstances(manifest, blocks, values),
        *_apart(design, judged, values, nodes),
    ]
    found = analyse(planned, design, contrasts, values, nodes, told)
    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    metrics = {
        name: _judged_as(OFFERED if name in offered else CONTRADICTED, each)
        if doubts or name in offered
        else each
        for name, each in found.metrics.items()
    }
    return msgspec.structs.replace(found, metrics=metrics)


def _judged_as(verdict: Verdict, found: Effects) -> Effects:
    effects = [
        msgspec.structs.replace(each, verdict=verdict.stored) if each.verdict is not None else each
        for each in found.effects
    ]
    return msgspec.structs.replace(found, effects=effects)


def analyse(
    planned: Factorial,
    design: Design,
    contrasts: Plan,
    values: Series,
    nodes: Sequence[str],
    warnings: list[Warning],
) -> FactorialResult:
    """Every effect on every metric that is positive in each block of each arm. `values`: metric → arm → one
    value per block. `nodes`: where each block was measured; about an effect of which they disagree, each node
    counts once."""
    names = [each.toggle for each in planned.factors]
    settings = levels(planned.factors, design.arms)
    found: dict[str, Effects] = {}
    for metric, per_arm in values.items():
        kind = definitions.METRICS[metric]
        blocks = np.array([per_arm[arm.name] for arm in design.arms if arm.name in per_arm]).T
        if blocks.shape[-1] != len(design.arms) or not (blocks > 0).all() or kind.can_be_zero:
            continue
        means = np.exp(np.log(blocks).mean(axis=0))
        found[metric] = Effects(
            unit=kind.unit,
            better=kind.better,
            settings={arm.name: float(mean) for arm, mean in zip(design.arms, means, strict=True)},
            effects=_effects(
                contrasts, blocks, metric, design.margin if metric == design.primary else None, nodes
            ),
            alone={
                name: _effect([name], alone(settings, at), blocks, nodes) for at, name in enumerate(names)
            },
            with_others={
                name: _effect([name], with_others(settings, at), blocks, nodes)
                for at, name in enumerate(names)
            },
            together=_effect(names, together(settings), blocks, nodes),
        )
    return FactorialResult(
        factors=list(planned.factors),
        blocks=len(nodes),
        settings={arm.name: {name: arm.toggles[name] for name in names} for arm in design.arms},
        aliased=[
            Aliased(effect=list(term), others=[list(each) for each in others])
            for term, others in contrasts.aliased.items()
        ],
        metrics=found,
        left_out=list(planned.left_out),
        warnings=ranked(warnings),
    )


def disagree(values: Floats, weights: Floats, nodes: Sequence[str]) -> bool:
    """Whether nodes disagree about an effect. `values`: a row per block."""
    found = agreement(np.log(values) @ weights, nodes, margin=0.0)
    return found is not None and found.disagree


def by_unit(values: Floats, weights: Floats, nodes: Sequence[str]) -> Floats:
    """What an effect is made of: a row per block, or per node where these disagree about it."""
    if not disagree(values, weights, nodes):
        return values
    return np.array([of_nodes(column, nodes, "ratio") for column in values.T]).T


def _apart(
    design: Design,
    judged: Mapping[str, Floats],
    values: Series,
    nodes: Sequence[str],
) -> list[Warning]:
    """Which judged effects on the primary nodes disagree about."""
    blocks = np.array([values[design.primary][arm.name] for arm in design.arms]).T
    apart = [name for name, weights in judged.items() if disagree(blocks, weights, nodes)]
    return [NodesDisagreeAbout(tuple(apart), len(set(nodes)))] if apart else []


def _effects(
    planned: Plan, values: Floats, metric: str, margin: float | None, nodes: Sequence[str]
) -> list[Effect]:
    """Main effects and interactions; with verdicts where there is a margin."""
    units = {each.term: by_unit(values, each.weights, nodes) for each in planned.contrasts}
    effects = {each.term: estimate(units[each.term], each.weights) for each in planned.contrasts}
    family = {
        term: effect.p
        for term, effect in effects.items()
        if margin is not None and len(term) <= JUDGED_ORDER and effect.p is not None
    }
    adjusted = decision.holm(family)
    found = []
    for each in planned.contrasts:
        row = _as_row(each.term, effects[each.term], [list(other) for other in each.assumes])
        if margin is not None and each.term in adjusted:
            p = adjusted[each.term]
            verdict = judge(each, units[each.term], margin, definitions.METRICS[metric], p)
            row = msgspec.structs.replace(row, p_adjusted=p, verdict=verdict)
        found.append(row)
    return found


def _effect(
    term: Sequence[str], weights: Floats | None, values: Floats, nodes: Sequence[str]
) -> Effect | None:
    if weights is None:
        return None
    return _as_row(term, estimate(by_unit(values, weights, nodes), weights))


def _as_row(term: Sequence[str], effect: paired.Effect, assumes: list[list[str]] | None = None) -> Effect:
    assert effect.change is not None
    return Effect(
        effect=list(term),
        change=effect.change,
        ci_low=effect.low,
        ci_high=effect.high,
        sd=effect.sd,
        p=effect.p,
        assumes=assumes or [],
    )


CSV_COLUMNS = ("change", "ci_low", "ci_high", "sd", "p", "p_adjusted", "verdict")


def rows(factorial: FactorialResult) -> Iterator[dict[str, Any]]:
    """Every effect on every metric, one by one; `effect` as in `label`."""
    for metric, effects in factorial.metrics.items():
        placed = [
            *(("alone", row) for row in effects.alone.values()),
            *(("with_others", row) for row in effects.with_others.values()),
            *(("average", row) for row in effects.effects),
            ("together", effects.together),
        ]
        for where, row in placed:
            if row is not None:
                told = {**msgspec.structs.asdict(row), "effect": label(row.effect), "where": where}
                yield {"metric": metric, **told}
