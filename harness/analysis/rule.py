"""Whether a run has enough blocks, by the rule that was declared before its first one."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_bench.harness.analysis.result import Judged
from overlap_bench.harness.analysis.values import (
    THROUGHPUTS,
    check_values,
    effect_of,
    kind_of,
    measured,
    offered_load,
)
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan import checks
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import verdicts
from overlap_bench.harness.stats.stopping import Until


def enough(design: Design, per_block: Sequence[Values]) -> bool:
    """Whether the rule stops the run after these blocks. Raises EngineError for a metric that the first block
    can't give, rather than once all are done."""
    if design.until is None and len(per_block) > 1:
        return False
    check_values(design, per_block, checks.gated(design))
    return design.until is not None and reason_to_stop(design, per_block) is not None


def reason_to_stop(design: Design, per_block: Sequence[Values]) -> str | None:
    """Why the run ends after these blocks; None where it goes on."""
    done, until = len(per_block), design.until
    if until is None:
        if done < design.blocks:
            return None
        return f"all {done} trials done" if done > 1 else "its one trial done"
    if done not in until.looks:
        return None
    if design.gate is not None:
        from overlap_bench.harness.analysis import gate

        said = gate.overall(judged(design, per_block, checks.gated(design), design.gate.max_regression))
        enough, found = said != "undecided", f"the gate says {said}"
    else:
        enough, found = _enough_of_primary(design, until, per_block)
    if enough:
        return f"decided at {done} of at most {design.blocks} trials: {found}"
    return f"{done} trials, the most allowed: {found}" if done == design.blocks else None


def _enough_of_primary(design: Design, until: Until, per_block: Sequence[Values]) -> tuple[bool, str]:
    """Whether the rule has enough of the primary, and what it found."""
    check_values(design, per_block, [design.primary], ratio=until.precision is not None)
    alpha = design.alpha(len(per_block))
    effect = effect_of(design.primary, measured(design, per_block, [design.primary])[design.primary], alpha)
    if until.precision is None:
        said = verdicts.verdict(effect, design.margin, *kind_of(design.primary), alpha=alpha) or "undecided"
        return said != "undecided", f"{design.primary} is {said}"
    assert effect.low is not None
    assert effect.high is not None
    half = (effect.high - effect.low) / 2
    enough = half <= until.precision
    return enough, f"half-width {half:.2%}, {'' if enough else 'not '}within {100 * until.precision:.3g}%"


def judged(
    design: Design, per_block: Sequence[Values], names: Sequence[str], limit: float
) -> dict[str, Judged]:
    """What a gate says of these metrics after these blocks."""
    from overlap_bench.harness.analysis import gate

    check_values(design, per_block, names)
    values = measured(design, per_block)
    rest = [name for name in names if not gate.is_gone(name, *values[name].values())]
    check_values(design, per_block, rest, ratio=True)
    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    return gate.judge(values, names, limit, checks.level(design, len(per_block)), offered)
