"""From the trials of a run to its Result: effects, verdicts, what else was seen, warnings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from overlap_bench.harness.analysis import decision, outputs, prediction, turns, verdict_warnings
from overlap_bench.harness.analysis.arm_warnings import circumstances
from overlap_bench.harness.analysis.mechanism import limits, mechanism, planted
from overlap_bench.harness.analysis.result import (
    Comparison,
    MetricRow,
    Nodes,
    Result,
    Settings,
)
from overlap_bench.harness.analysis.values import (
    THROUGHPUTS,
    Series,
    block_seconds,
    block_values,
    check_values,
    counted,
    effect_of,
    lacking,
    measured,
    offered_load,
    reason_to_stop,
    scale_of,
)
from overlap_bench.harness.analysis.warnings import Warning, applicable, ranked
from overlap_bench.harness.common.formatting import blocks_of, minutes_of
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values, values_between
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store.files import SCHEMA_VERSION
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block


def result(manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values] | None = None) -> Result:
    """What a run found that measured `blocks` and then stopped. `per_block`: block_values of each."""
    described = list(manifest.descriptions.values())
    design = manifest.design
    per_block = per_block or [block_values(design, block) for block in blocks]
    ended = reason_to_stop(design, per_block) or in_time(manifest, len(blocks))
    compared = (
        _of_several(manifest, blocks, per_block)
        if len(design.arms) > 2
        else [comparison(manifest, blocks, per_block)]
    )
    several = None
    if design.factorial is not None:
        from overlap_bench.harness.analysis import factorial

        several = factorial.of_run(manifest, design.factorial, blocks, per_block, compared)
    return Result(
        schema_version=SCHEMA_VERSION,
        run=manifest.run,
        device=described[0].device["kind"] if described else "unknown",
        stopped_because=ended or f"ended after {blocks_of(len(blocks))}",
        factorial=several,
        comparisons=compared,
    )


def in_time(manifest: Manifest, blocks: int) -> str | None:
    """Why the run ended after so many blocks, if time was up; None where it was not."""
    limit, foreseen = manifest.design.max_minutes, manifest.blocks_foreseen
    if limit is None or blocks != manifest.blocks_in_time:
        return None
    slower = ""
    if foreseen is not None and foreseen > blocks:
        slower = f" (by the first boots {foreseen} would have: the machine became slower)"
    again = f" (and {minutes_of(limit)} more for each time it was resumed)" if manifest.resumed_after else ""
    return f"{blocks_of(blocks)}, as many as fit into {minutes_of(limit)}{again}{slower}"


def _of_several(manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values]) -> list[Comparison]:
    """The first of three arms or more against each of the others. Their verdicts form two families, each with
    Holm-adjusted p: those on the primary, and those on all secondaries together."""
    design = manifest.design
    first, *others = (arm.name for arm in design.arms)
    pairs = {other: manifest.pair(first, other) for other in others}
    values = {other: of_two(blocks, per_block, (first, other)) for other in others}
    alpha = design.alpha(len(blocks))
    effects = {
        other: _effects(pair.design, *_counted(pair.design, blocks, values[other]), alpha)[0]
        for other, pair in pairs.items()
    }
    adjusted: dict[str, dict[str, float]] = {other: {} for other in others}
    for family in ([design.primary], design.secondaries):
        raw = {
            (other, name): p for other, found in effects.items() for name, p in _family(found, family).items()
        }
        for (other, name), p in decision.holm(raw).items():
            adjusted[other][name] = p
    found = []
    for other, pair in pairs.items():
        named = msgspec.structs.replace(pair.design, name=f"{pair.design.name}: {other}")
        only = [block.only((first, other)) for block in blocks]
        of_one = msgspec.structs.replace(pair, design=named)
        found.append(comparison(of_one, only, values[other], adjusted[other]))
    return found


def of_pair(manifest: Manifest, blocks: Sequence[Block], before: str, after: str) -> Comparison:
    """The comparison of any two arms, as if the run had no others: sound, since they were interleaved."""
    pair = manifest.pair(before, after)
    chosen = [block.only((before, after)) for block in blocks]
    return comparison(pair, chosen, [block_values(pair.design, block) for block in chosen])


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
    before, *after = design.arms_with_plant(manifest.plant_ns)
    check_values(design, per_block, [design.primary])
    alpha = design.alpha(len(blocks))
    deciding, kept = _counted(design, blocks, per_block)
    values = measured(design, kept)
    effects, by_node = _effects(design, deciding, kept, alpha)
    if adjusted is None:
        adjusted = decision.holm(_family(effects, design.secondaries))

    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    names = (design.primary, *design.secondaries)
    of_turns = [name for name in names if definitions.METRICS[name].of_turns and name in effects]
    doubt = turns.disagreement(design, kept, alpha) if of_turns else None
    apart = doubt if design.primary in of_turns else None
    decided = decision.on_declared(design, effects, adjusted, alpha, offered, doubt, manifest.never_ran)
    rows = {
        name: msgspec.structs.replace(
            MetricRow.of_metric(name, per_arm[before.name], effects.get(name)),
            p_adjusted=adjusted.get(name) if name in decided and name not in offered else None,
            verdict=decided[name].stored if name in decided else None,
        )
        for name, per_arm in values.items()
    }
    verdict = decided.get(design.primary)
    warnings: list[Warning] = [] if apart is None else [verdict_warnings.Contradicted(apart)]
    if doubt is not None and apart is None:
        warnings.append(verdict_warnings.TurnsNotBelieved(tuple(of_turns), doubt))
    word = None if verdict is None or apart is not None else verdict.word
    without = _without_verdict(design, per_block)
    of_primary = _of_primary(manifest, deciding, values, effects, word, by_node)
    left_out = sorted({block.number for block in blocks} - {block.number for block in deciding})
    if left_out:
        warnings.append(verdict_warnings.LeftOut(len(left_out), len(blocks)))

    if after and apart is None:
        warnings += turns.of_size(design, kept, alpha)
    warnings += [*without, *turns.of_turns(design, blocks), *of_primary]
    in_turns = turns.sliced(design, deciding) if after else None
    did = mechanism(design, blocks)
    return Comparison(
        variant=design.name,
        before=Settings.of(before),
        after=Settings.of(after[0]) if after else None,
        blocks=len(deciding),
        left_out=left_out,
        confidence=1 - alpha,
        margin=design.margin,
        primary=design.primary,
        metrics=rows,
        sliced=in_turns,
        mechanism=did | planted(design, did, values),
        limit=limits(design, values),
        outputs=outputs.same(manifest, blocks),
        failures=outputs.failures(design, blocks),
        prediction=prediction.predict(manifest, deciding, rows) if after else None,
        nodes=by_node,
        changed_code=manifest.changed_code if after else None,
        overlaid=manifest.overlaid,
        verdict=verdict,
        warnings=ranked([*warnings, *circumstances(manifest, blocks, values)]),
    )


def _counted(
    design: Design, blocks: Sequence[Block], per_block: Sequence[Values]
) -> tuple[list[Block], list[Values]]:
    """The blocks that decide, and their values."""
    places = counted(design, per_block, design.gated)
    return [blocks[each] for each in places], [per_block[each] for each in places]


def _effects(
    design: Design, blocks: Sequence[Block], per_block: Sequence[Values], alpha: float
) -> tuple[dict[str, paired.Effect], Nodes | None]:
    """By metric, of two arms, nothing of one alone; and what each node says of the primary, where there are
    several."""
    measured_by = [block.node for block in blocks]
    values = measured(design, per_block)
    both = {name: per_arm for name, per_arm in values.items() if len(per_arm) == 2}
    if len(set(measured_by)) < 2:
        return {name: effect_of(name, per_arm, alpha) for name, per_arm in both.items()}, None

    from overlap_bench.harness.analysis import nodes

    effects = {name: nodes.effect(design, name, each, measured_by, alpha) for name, each in both.items()}
    return effects, nodes.on_nodes(design, both, measured_by, alpha)


def _family(effects: Mapping[str, paired.Effect], names: Sequence[str]) -> dict[str, float]:
    """p of metrics that were declared together. One that could not be compared keeps its place in the family
    (p = 1): leaving it out would test the others at a laxer level. One block has no p at all."""
    found = {name: effects[name].p if name in effects else 1.0 for name in names}
    return {name: p for name, p in found.items() if p is not None}


def _without_verdict(design: Design, per_block: Sequence[Values]) -> list[Warning]:
    if len(design.arms) < 2:
        return []
    found = ((name, lacking(design, per_block, name)) for name in design.secondaries)
    return [verdict_warnings.NoVerdictOn(name, where) for name, where in found if where is not None]


def _of_primary(
    manifest: Manifest,
    blocks: Sequence[Block],
    values: Series,
    effects: Mapping[str, paired.Effect],
    word: str | None,
    by_node: Nodes | None,
) -> list[Warning]:
    design = manifest.design
    effect = effects.get(design.primary)
    if effect is None:
        return []
    decided = verdict_warnings.Decided(
        design=design,
        trials=len(blocks),
        effect=effect,
        word=word,
        seconds=block_seconds(blocks),
        nodes=0 if by_node is None else len(by_node.changes),
        disagree_by=by_node.spread if by_node is not None and by_node.unit == "node" else None,
    )
    said = applicable(verdict_warnings.OfVerdict, decided)
    before, after = values[design.primary].values()
    if scale_of(design.primary, before, after) == "ratio" and len(blocks) > 1:
        numbers = [block.number for block in blocks]
        said += verdict_warnings.of_order(manifest, numbers, before, after)
    return said


def of_two(blocks: Sequence[Block], per_block: Sequence[Values], arms: Sequence[str]) -> list[Values]:
    """The values of two of several arms, as if the run had no others: matched by the batches of these two."""
    return [
        {arm: {**values[arm], **between[arm]} for arm in arms}
        for block, values in zip(blocks, per_block, strict=True)
        for between in [values_between(block.of, arms)]
    ]
