"""From the blocks of a run to its Result: effects, verdicts, outputs, mechanism, limit, warnings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from overlap_bench.harness.analysis import (
    decision,
    outputs,
    prediction,
    turns,
    verdict_warnings,
    words,
)
from overlap_bench.harness.analysis.arm_warnings import circumstances
from overlap_bench.harness.analysis.mechanism import mechanism, planted
from overlap_bench.harness.analysis.result import (
    Comparison,
    FactorialResult,
    MetricRow,
    Nodes,
    Patched,
    Result,
    Settings,
    Sides,
)
from overlap_bench.harness.analysis.values import (
    THROUGHPUTS,
    block_seconds,
    block_values,
    check_values,
    effect_of,
    kind_of,
    lacking,
    measured,
    offered_load,
    reason_to_stop,
    sides,
)
from overlap_bench.harness.analysis.warnings import Warning, ranked
from overlap_bench.harness.common.formatting import blocks_of, minutes_of
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values, values_between
from overlap_bench.harness.plan.design import Arm, Design, Factorial
from overlap_bench.harness.stats import paired, verdicts
from overlap_bench.harness.stats.stopping import ALPHA
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block

LIMITS = ("device_busy", "exposed_host_us")


def result(manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values] | None = None) -> Result:
    """What a run found that measured `blocks` and then stopped. `per_block`: block_values of each."""
    described = list(manifest.descriptions.values())
    design = manifest.design
    per_block = per_block or [block_values(design, block) for block in blocks]
    return Result(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        device=described[0].device["kind"] if described else "unknown",
        stopped_because=reason_to_stop(design, per_block)
        or in_time(manifest, len(blocks))
        or f"ended after {blocks_of(len(blocks))}",
        comparisons=comparisons(manifest, blocks, per_block),
        factorial=None
        if design.factorial is None
        else _factorial(manifest, design.factorial, blocks, per_block),
    )


def _factorial(
    manifest: Manifest, planned: Factorial, blocks: Sequence[Block], per_block: Sequence[Values]
) -> FactorialResult:
    from overlap_bench.harness.analysis import factorial
    from overlap_bench.harness.stats import contrasts

    design = manifest.design
    check_values(design, per_block, [design.primary], ratio=True)
    values = measured(design, per_block)
    judged = {
        contrasts.label(each.term): each.weights for each in factorial.declared(planned.factors, design.arms)
    }
    numbers = [block.number for block in blocks]
    told = [
        *verdict_warnings.few_trials(design, len(blocks)),
        *verdict_warnings.of_order_of_factorial(manifest, numbers, values, judged),
        *circumstances(manifest, blocks, values),
    ]
    return factorial.analyse(planned, design, values, [block.node for block in blocks], told)


def in_time(manifest: Manifest, blocks: int) -> str | None:
    """Why the run ended after so many blocks, if time was up; None where it was not."""
    limit, foreseen = manifest.design.max_minutes, manifest.blocks_foreseen
    if limit is None or blocks != manifest.blocks_in_time:
        return None
    slower = ""
    if foreseen is not None and foreseen > blocks:
        slower = f" (by the first boots {foreseen} would have: the machine became slower)"
    return f"{blocks_of(blocks)}, as many as fit into {minutes_of(limit)}{slower}"


def comparisons(manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values]) -> list[Comparison]:
    """The first arm against each of the others. Where those are several, their verdicts form two families,
    each with Holm-adjusted p: those on the primary, and those on all secondaries together."""
    design = manifest.design
    if len(design.arms) <= 2:
        return [comparison(manifest, blocks, per_block)]
    first, *others = (arm.name for arm in design.arms)
    pairs = {other: manifest.pair(first, other) for other in others}
    values = {other: of_two(blocks, per_block, (first, other)) for other in others}
    measured_by = [block.node for block in blocks]
    effects = {
        other: _effects(pair.design, measured(pair.design, values[other]), measured_by)
        for other, pair in pairs.items()
    }
    adjusted: dict[str, dict[str, float]] = {other: {} for other in others}
    for family in ([design.primary], design.secondaries):
        raw = {
            (other, name): p for other, found in effects.items() for name, p in _family(found, family).items()
        }
        for (other, name), p in verdicts.holm(raw).items():
            adjusted[other][name] = p
    return [
        comparison(_named(pair, other), [block.only((first, other)) for block in blocks], values[other],
                   adjusted[other])
        for other, pair in pairs.items()
    ]  # fmt: skip


def of_pair(manifest: Manifest, blocks: Sequence[Block], before: str, after: str) -> Comparison:
    """The comparison of any two arms, as if the run had no others: sound, since they were interleaved."""
    pair = manifest.pair(before, after)
    chosen = [block.only((before, after)) for block in blocks]
    return comparison(pair, chosen, [block_values(pair.design, block) for block in chosen])


def _named(pair: Manifest, after: str) -> Manifest:
    design = msgspec.structs.replace(pair.design, name=f"{pair.design.name}: {after}")
    return msgspec.structs.replace(pair, design=design)


def comparison(
    manifest: Manifest,
    blocks: Sequence[Block],
    per_block: Sequence[Values],
    adjusted: Mapping[str, float] | None = None,
) -> Comparison:
    """One comparison; with one arm `after` is null, and so is all but `before` of each metric.

    `confidence` is that of every interval: where a run may stop early, 1 - the level of its last look.
    `adjusted`: p by metric, where this is one of several comparisons; else the secondaries are adjusted
    among themselves.
    """
    design = manifest.design
    check_values(design, per_block, [design.primary])
    alpha = design.alpha(len(blocks))
    values = measured(design, per_block)
    measured_by = [block.node for block in blocks]
    effects = _effects(design, values, measured_by)
    by_node = None
    if len(design.arms) > 1 and len(set(measured_by)) > 1:
        from overlap_bench.harness.analysis import nodes

        by_node = nodes.on_nodes(design, per_block, measured_by, alpha)
    if adjusted is None:
        adjusted = verdicts.holm(_family(effects, design.secondaries))
    offered = offered_load(design, per_block)
    before, *after = design.arms_with_plant(manifest.plant_ns)
    did = mechanism(design, blocks)
    apart = turns.disagreement(design, per_block, alpha) if design.primary in definitions.OF_PAIRS else None
    never = never_ran(manifest)
    decided = {
        name: _decided(design, name, effects[name], adjusted.get(name), offered, alpha)
        for name in dict.fromkeys((design.primary, *design.secondaries))
        if name in effects
    }
    judged = [name for name, found in decided.items() if found != decision.OFFERED]
    if apart is not None:
        decided[design.primary] = decision.CONTRADICTED
    if never is not None:
        decided = dict.fromkeys(decided, decision.never_ran(never))
    rows = {
        name: msgspec.structs.replace(
            metric_row(name, per_arm[design.arms[0].name], effects.get(name)),
            p_adjusted=adjusted.get(name) if name in judged else None,
            verdict=decided[name].stored if name in decided else None,
        )
        for name, per_arm in values.items()
    }
    verdict = decided.get(design.primary)
    word = None if verdict is None or apart is not None else verdict.word
    return Comparison(
        variant=design.name,
        before=settings(before),
        after=settings(after[0]) if after else None,
        blocks=len(blocks),
        confidence=1 - alpha,
        margin=design.margin,
        primary=design.primary,
        metrics=rows,
        outputs=outputs.same(manifest, blocks),
        failures=outputs.failures(design, blocks),
        mechanism=did | planted(design, did, values),
        limit=limits(design, values),
        prediction=prediction.predict(manifest, blocks, rows) if after else None,
        sliced=turns.sliced(design, blocks) if after else None,
        nodes=by_node,
        changed_code=manifest.changed_code if after else None,
        overlaid=manifest.overlaid,
        verdict=verdict,
        warnings=ranked(
            [
                *([] if apart is None else [verdict_warnings.Contradicted(apart)]),
                *(turns.of_size(design, per_block, alpha) if after and apart is None else []),
                *_without_verdict(design, per_block),
                *turns.of_turns(design, blocks),
                *_of_primary(manifest, blocks, values, word, by_node, alpha),
                *circumstances(manifest, blocks, values),
            ]
        ),
    )


def _of_primary(
    manifest: Manifest,
    blocks: Sequence[Block],
    values: Mapping[str, Mapping[str, Sequence[float]]],
    word: str | None,
    by_node: Nodes | None,
    alpha: float,
) -> Iterator[Warning]:
    """What is to be said of the decision on the primary."""
    design = manifest.design
    per_arm = values.get(design.primary, {})
    if len(per_arm) != 2:
        return
    effect, (before, after) = effect_of(design.primary, per_arm, alpha), per_arm.values()
    disagree_by = by_node.spread if by_node is not None and by_node.unit == "node" else None
    yield from verdict_warnings.of_decision(
        verdict_warnings.Decided(
            design=design,
            trials=len(blocks),
            effect=effect,
            word=word,
            seconds=block_seconds(blocks),
            nodes=0 if by_node is None else len(by_node.changes),
            disagree_by=disagree_by,
        )
    )
    if effect.scale == "ratio" and effect.sd is not None:
        numbers = [block.number for block in blocks]
        yield from verdict_warnings.of_order(manifest, numbers, before, after)


def _without_verdict(design: Design, per_block: Sequence[Values]) -> Iterator[Warning]:
    """Declared secondaries that some trial has no value of."""
    for name in design.secondaries if len(design.arms) > 1 else ():
        if (where := lacking(design, per_block, name)) is not None:
            yield verdict_warnings.NoVerdictOn(name, where)


def never_ran(manifest: Manifest) -> str | None:
    """Why there is nothing to judge, where none of the code that differs between the arms ran."""
    changed = manifest.changed_code
    return None if changed is None or changed.counts else changed.never_ran


def so_far(design: Design, per_block: Sequence[Values]) -> str:
    """The primary's change with its 95% interval, in words; "" where two arms, two blocks or a value are
    missing. For whoever watches a run: it decides nothing."""
    per_arm = measured(design, per_block, [design.primary]).get(design.primary, {})
    if len(per_block) < 2 or len(design.arms) != 2 or len(per_arm) != 2:
        return ""
    effect = effect_of(design.primary, per_arm, ALPHA)
    row = metric_row(design.primary, per_arm[design.arms[0].name], effect)
    return f"{design.primary} {words.difference(row)} {words.interval(row)}"


def limits(design: Design, values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Sides]:
    """How far the rest is from the limit: LIMITS of each arm, means over blocks."""
    return {
        name: sides(design, {arm: float(np.mean(each)) for arm, each in values[name].items()})
        for name in LIMITS
        if name in values
    }


def settings(arm: Arm) -> Settings:
    """An arm as it stands in a result: everything but its name, and of its options those that are known."""
    options = msgspec.to_builtins(arm.options)
    return Settings(
        engine=arm.engine,
        options=options if arm.known is None else {name: options[name] for name in arm.known},
        toggles=arm.toggles,
        python=arm.python,
        env=arm.env,
        ref=arm.ref,
        patch=None if arm.patch is None else Patched.of(arm.patch),
    )


def of_two(blocks: Sequence[Block], per_block: Sequence[Values], arms: Sequence[str]) -> list[Values]:
    """The values of two of several arms, as if the run had no others: matched by the batches of these two."""
    return [
        {arm: {**values[arm], **between[arm]} for arm in arms}
        for block, values in zip(blocks, per_block, strict=True)
        for between in [values_between(block.of, arms)]
    ]


def _effects(
    design: Design, values: Mapping[str, Mapping[str, Sequence[float]]], measured_by: Sequence[str]
) -> dict[str, paired.Effect]:
    """By metric, of two arms; nothing of one alone. `measured_by`: the node of each block."""
    alpha = design.alpha(len(measured_by))
    both = {name: per_arm for name, per_arm in values.items() if len(per_arm) == 2}
    if len(set(measured_by)) < 2:
        return {name: effect_of(name, per_arm, alpha) for name, per_arm in both.items()}

    from overlap_bench.harness.analysis import nodes

    return {name: nodes.effect(design, name, per_arm, measured_by, alpha) for name, per_arm in both.items()}


def _family(effects: Mapping[str, paired.Effect], names: Sequence[str]) -> dict[str, float]:
    """p of metrics that were declared together. One that could not be compared keeps its place in the family
    (p = 1): leaving it out would test the others at a laxer level. One block has no p at all."""
    found = {name: effects[name].p if name in effects else 1.0 for name in names}
    return {name: p for name, p in found.items() if p is not None}


def metric_row(name: str, before: Sequence[float], effect: paired.Effect | None) -> MetricRow:
    """A metric of the result, not judged yet; without an effect there is one arm alone."""
    metric = definitions.METRICS[name]
    if effect is None:
        return MetricRow(unit=metric.unit, better=metric.better, before=float(np.mean(before)))
    return MetricRow(
        unit=metric.unit,
        better=metric.better,
        before=effect.before,
        after=effect.after,
        change=effect.change,
        delta=effect.delta,
        ci_low=effect.low,
        ci_high=effect.high,
        sd=effect.sd,
        p=effect.p,
    )


def _decided(
    design: Design, name: str, effect: paired.Effect, p_adjusted: float | None, offered: bool, alpha: float
) -> decision.Verdict:
    """What is decided about a declared metric, whatever else speaks against it."""
    if name in THROUGHPUTS and offered:
        return decision.OFFERED
    if any(arm.is_remote for arm in design.arms):
        return decision.ONE_BOOT
    return decision.decide(effect, design.margin, *kind_of(name), p_adjusted, alpha)
