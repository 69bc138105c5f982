"""The nodes of a cluster in a comparison: the change on each, whether they disagree, and what then counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlap_bench.harness.analysis.result import NodeRow, Nodes
from overlap_bench.harness.analysis.values import Series, effect_of, measured, scale_of
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.nodes import Agreement, agreement, of_nodes


def agreed(
    name: str, per_arm: Mapping[str, Sequence[float]], nodes: Sequence[str], margin: float
) -> Agreement | None:
    """Whether nodes agree about a metric of two arms; None where nobody can tell."""
    before, after = per_arm.values()
    return agreement(paired.paired(before, after, scale_of(name, before, after)), nodes, margin)


def effect(
    design: Design, name: str, per_arm: Mapping[str, Sequence[float]], nodes: Sequence[str], alpha: float
) -> paired.Effect:
    """The effect of a metric over blocks, or, where nodes disagree about it, over nodes."""
    found = agreed(name, per_arm, nodes, design.margin)
    if found is None or not found.disagree:
        return effect_of(name, per_arm, alpha)
    scale = scale_of(name, *per_arm.values())
    return effect_of(name, {arm: of_nodes(values, nodes, scale) for arm, values in per_arm.items()}, alpha)


def on_nodes(design: Design, values: Series, nodes: Sequence[str], alpha: float) -> Nodes | None:
    """The primary's change on each of several nodes, by itself; None of one arm."""
    per_arm = values.get(design.primary, {})
    if len(per_arm) != 2:
        return None
    found = agreed(design.primary, per_arm, nodes, design.margin)
    changes = {}
    for node in dict.fromkeys(nodes):
        own = {
            arm: [value for value, where in zip(values, nodes, strict=True) if where == node]
            for arm, values in per_arm.items()
        }
        alone = effect_of(design.primary, own, alpha)
        changes[node] = NodeRow(
            unit=definitions.METRICS[design.primary].unit,
            blocks=alone.blocks,
            change=alone.change,
            delta=alone.delta,
            ci_low=alone.low,
            ci_high=alone.high,
        )
    return Nodes(
        unit="node" if found is not None and found.disagree else "trial",
        p=None if found is None else found.p,
        spread=None if found is None else found.spread,
        power=None if found is None else found.power,
        changes=changes,
    )


def disagreement(
    design: Design, per_block: Sequence[Values], nodes: Sequence[str], names: Sequence[str]
) -> str | None:
    """Which of these metrics nodes disagree about, for a gate, whose bounds are over blocks; None of none."""
    for name, per_arm in measured(design, per_block, names).items():
        found = agreed(name, per_arm, nodes, design.margin) if len(per_arm) == 2 else None
        if found is not None and found.disagree:
            return f"nodes disagree about {name} (p = {found.p:.3f})"
    return None
