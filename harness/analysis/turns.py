"""Whether what turns say of the decode step can be believed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.analysis.result import Sliced, Warning
from harness.analysis.values import Values
from harness.common.formatting import percent
from harness.metrics import slices
from harness.metrics.definitions import SLICED
from harness.plan.design import Design
from harness.stats import paired
from harness.store.block import Block

OF_ROUNDS = "step_ms_matched"  # the same step, in the rounds: at the before arm's mix of batches
BUSY = 0.05  # of a core, while parked


def disagreement(design: Design, per_block: Sequence[Values], alpha: float) -> str | None:
    """Where turns and rounds surely differ by more than the margin in what changed, in words: the step that
    turns compare is then not the workload's. None also where either was not measured."""
    before, after = (arm.name for arm in design.arms)
    if len(per_block) < 2 or not all(
        values[arm].get(name, 0.0) > 0
        for values in per_block
        for arm in (before, after)
        for name in (SLICED, OF_ROUNDS)
    ):
        return None
    rounds, turns = (
        [values[after][name] / values[before][name] for values in per_block] for name in (OF_ROUNDS, SLICED)
    )
    apart = paired.effect(rounds, turns, "ratio", alpha)
    assert apart.low is not None
    assert apart.high is not None
    if apart.low <= design.margin and apart.high >= -design.margin:
        return None
    return (
        f"slices and rounds disagree: between them lies {percent(apart.change)} "
        f"[{percent(apart.low)}, {percent(apart.high)}]; the step of the rounds is {OF_ROUNDS}"
    )


def sliced(design: Design, blocks: Sequence[Block]) -> Sliced | None:
    """What two arms had to be compared by; None where they took no turns."""
    before, after = (arm.name for arm in design.arms)
    sides = [(block.of(before, "slices"), block.of(after, "slices")) for block in blocks]
    sides = [(one, other) for one, other in sides if len(one) and len(other)]
    if not sides:
        return None
    pairs = [slices.pair(*each) for each in sides]
    batches = np.concatenate([each["batch"] for each in pairs])
    return Sliced(
        steps=design.turn_steps,
        batch=float(batches.mean()) if len(batches) else 0.0,
        pairs=len(batches),
        kept=min(slices.kept(*each) for each in sides),
    )


def of_turns(design: Design, blocks: Sequence[Block]) -> list[Warning]:
    """What weakens a comparison by turns: an arm that computes while the other one has its turn."""
    found = []
    for arm in design.arms:
        shares = [
            slices.busy_while_parked(part) for block in blocks if len(part := block.of(arm.name, "slices"))
        ]
        if shares and max(shares) > BUSY:
            found.append(
                Warning(
                    "noise",
                    f"{arm.name} used up to {max(shares):.0%} of a core while it was parked, which slows the "
                    "others alone",
                )
            )
    return found
