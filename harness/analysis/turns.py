"""Whether what turns say of the decode step can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from overlap_bench.harness.analysis.result import Sliced
from overlap_bench.harness.analysis.verdict_warnings import BusyWhileWaiting, RoundsDiffer
from overlap_bench.harness.analysis.warnings import Warning
from overlap_bench.harness.common.formatting import percent
from overlap_bench.harness.metrics import slices
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.metrics.definitions import DRAINED, OF_PAIRS, SLICED
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.store.tables import Block

OF_ROUNDS = "round_step_ms"  # the same step, in the rounds: at the before arm's mix of batches
OF_CLIENTS = "tpot_ms_p50"  # what there is of it where an engine records no steps in rounds
BUSY = 0.05  # of a core, while parked
TOLD = 0.05  # of the pairs: from so many disturbed ones on, what they say is told
SURE = 0.01  # the level of what takes a verdict back: there are two such tests a run


def disagreement(design: Design, per_block: Sequence[Values], alpha: float) -> str | None:
    """Why turns decide nothing here, in words; None where nothing speaks against them, or too little was
    measured to tell.

    Enough turns must be undisturbed in each block of those that count (values.counted), unless the change is
    one that sharing the cores can't make. A step must cost as much when a turn is counted to its very end,
    within the margin; and rounds must not decide the opposite: the other direction, or a change surely beyond
    the margin where turns find none. That both agree on the direction and not on the size is no
    contradiction: `of_size` tells it.
    """
    alpha = min(alpha, SURE)
    turns = _effect(design, per_block, alpha, SLICED)
    why = disturbed(per_block)
    if why is not None and not (turns is not None and _beyond_sharing(turns)):
        return why
    if (apart := _apart(design, per_block, alpha, DRAINED)) is not None:
        return (
            f"an arm leaves work undone at the end of its turn; with that work ({DRAINED}), the change "
            f"differs by {_said(apart)}, so turns hide a part of it; {_judge_by(design, OF_ROUNDS)}"
        )
    for told in (OF_ROUNDS, OF_CLIENTS):
        rounds = _effect(design, per_block, alpha, told)
        if rounds is not None:
            break
    if turns is None or rounds is None:
        return None
    opposite = _side(turns, 0.0) * _side(rounds, 0.0) < 0
    none = -design.margin < (turns.low or 0.0) and (turns.high or 0.0) < design.margin
    if opposite or (none and _side(rounds, design.margin)):
        return (
            f"turns and rounds disagree: the step changed by {_said(turns)} in turns, and by {_said(rounds)} "
            f"in rounds ({told}); arrivals, prefills and the client are in rounds alone, or something "
            f"disturbs the machine; run bench doctor, or {_judge_by(design, told)}"
        )
    return None


def _judge_by(design: Design, name: str) -> str:
    """What decides in place of turns: a metric of rounds, which may be the primary already."""
    return f"judge by --primary {name}" if design.primary in OF_PAIRS else f"believe {design.primary} alone"


def disturbed(per_block: Sequence[Values]) -> str | None:
    """Why these blocks decide nothing by turns, where too few turns of one were undisturbed; None else."""
    shares = [slices.calm(each) for each in per_block if not slices.believed(each)]
    if not shares:
        return None
    return (
        f"other processes used the cores in {1 - min(shares):.0%} of a trial's turns; the others are too few "
        "to decide by; stop these processes, or give the run more time (--max-minutes)"
    )


def of_size(design: Design, per_block: Sequence[Values], alpha: float) -> list[Warning]:
    """Warn that the step changed by surely more, or less, in rounds than in turns."""
    apart, rounds = (
        _apart(design, per_block, alpha, OF_ROUNDS),
        _effect(design, per_block, alpha, OF_ROUNDS),
    )
    if apart is None or rounds is None:
        return []
    return [RoundsDiffer(OF_ROUNDS, _said(rounds), _said(apart))]


def _effect(
    design: Design, per_block: Sequence[Values], alpha: float, name: str, base: str = ""
) -> paired.Effect | None:
    """The effect on a metric, or on its ratio to another one; None where a block has no value of it."""
    before, after = (
        [
            values[arm.name].get(name, 0.0) / (values[arm.name].get(base, np.nan) if base else 1.0)
            for values in per_block
        ]
        for arm in design.arms
    )
    if len(per_block) < 2 or not all(each > 0 for each in (*before, *after)):
        return None
    return paired.effect(before, after, "ratio", alpha)


def _apart(design: Design, per_block: Sequence[Values], alpha: float, name: str) -> paired.Effect | None:
    """How far the change of another metric is from that in turns, where that is surely beyond the margin."""
    found = _effect(design, per_block, alpha, name, base=SLICED)
    return found if found is not None and _side(found, design.margin) else None


def _beyond_sharing(effect: paired.Effect) -> bool:
    """Whether a step surely takes more than twice as long, or less than half: a core that one other process
    wants too gives half of its time."""
    assert effect.low is not None
    assert effect.high is not None
    return effect.low > 1.0 or effect.high < -0.5


def _side(effect: paired.Effect, margin: float) -> int:
    """-1 or 1 where the whole interval lies below or above ±margin, else 0."""
    assert effect.low is not None
    assert effect.high is not None
    return int(effect.low > margin) - int(effect.high < -margin)


def _said(effect: paired.Effect) -> str:
    return f"{percent(effect.change)} [{percent(effect.low)}, {percent(effect.high)}]"


def sliced(design: Design, blocks: Sequence[Block]) -> Sliced | None:
    """What two arms had to be compared by; None where they took no turns."""
    before, after = (arm.name for arm in design.arms)
    sides = ((block.of(before, "slices"), block.of(after, "slices")) for block in blocks)
    parts = [_Part.of(*both) for both in sides if all(map(len, both))]
    if not parts:
        return None
    batches = np.concatenate([each.batches for each in parts])
    within, between = _components(parts)
    return Sliced(
        steps=design.turn_steps,
        batch=float(batches.mean()) if len(batches) else 0.0,
        pairs=len(batches),
        undisturbed=sum(each.calm for each in parts),
        disturbed=_mean_change(parts),
        kept=min(each.kept for each in parts),
        within=within,
        between=between,
    )


def _mean_change(parts: Sequence[_Part]) -> float | None:
    """The mean change of disturbed pairs, where they are a share that anybody would ask for."""
    calm, pairs = sum(each.calm for each in parts), sum(len(each.batches) for each in parts)
    found = [each.disturbed for each in parts if each.disturbed is not None]
    return float(np.expm1(np.mean(found))) if pairs - calm > TOLD * pairs else None


@dataclass(frozen=True, slots=True)
class _Part:
    """What the turns of one block have to say. `change`: of the step, as a log ratio."""

    batches: NDArray[np.float64]  # of each pair
    kept: float
    calm: int  # pairs beside which nothing else used the cores
    disturbed: float | None  # the change in the others, as a log ratio
    error: float
    change: float

    @classmethod
    def of(cls, before: pd.DataFrame, after: pd.DataFrame) -> _Part:
        first, second = slices.step_sliced(before, after)
        whole = [slices.decode_slices(each) for each in (before, after)]
        pairs = slices.pair(*whole)
        used, calm = slices.deciding(pairs), slices.undisturbed(pairs)
        disturbed = pairs.drop(calm.index)
        return cls(
            batches=pairs["batch"].to_numpy(float),
            kept=float(np.nan_to_num(slices.kept(pairs, *whole))),  # 0 where no turn is of decode steps
            calm=len(calm),
            disturbed=slices.trimmed(np.log(disturbed["interval_ns_after"] / disturbed["interval_ns_before"]))
            if len(disturbed)
            else None,
            error=slices.error_of_pairs(used),
            change=float(np.log(second.get(SLICED, np.nan) / first.get(SLICED, np.nan))),
        )


def _components(parts: Sequence[_Part]) -> tuple[float | None, float | None]:
    """What the change of a block scatters by: for its pairs, and from boot to boot. The second need not be
    what boots differ by: the change itself may be another one when the machine is slow."""
    within = float(np.sqrt(np.mean([each.error**2 for each in parts])))
    if not np.isfinite(within):
        return None, None
    changes = np.array([each.change for each in parts])
    if len(parts) < 2 or not np.isfinite(changes).all():  # too few pairs of a block give no change
        return within, None
    return within, float(np.sqrt(max(0.0, changes.var(ddof=1) - within**2)))


def of_turns(design: Design, blocks: Sequence[Block]) -> list[Warning]:
    """What weakens a comparison by turns: an arm that computes while the other one has its turn."""
    found: list[Warning] = []
    for arm in design.arms:
        shares = [
            slices.busy_while_parked(part) for block in blocks if len(part := block.of(arm.name, "slices"))
        ]
        if shares and max(shares) > BUSY:
            found.append(BusyWhileWaiting(arm.name, max(shares)))
    return found
