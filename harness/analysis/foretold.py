"""What a run's change of its host phases should have made of its step, by a sensitivity of its before arm,
beside what it made of it. A delay shows what slowing costs; what only makes a phase shorter or longer must
gain or cost as much."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.analysis.noise_floor import without_k
from overlap_bench.harness.analysis.sensitivity import ABSENT, Phase, Sensitivity, what_counts
from overlap_bench.harness.metrics.definitions import phase_metric
from overlap_bench.harness.metrics.steps import phase_times
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.stats.paired import half_width
from overlap_bench.harness.store.tables import Block


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    us: float
    low: float
    high: float


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a phase got longer by, in steps of rounds, and what a step feels of it."""

    phase: str
    change: Estimate
    slope: float
    felt_us: float


class Foretold(msgspec.Struct, frozen=True, kw_only=True):
    """`why_not`: why it is no change of this kind; "" where it is, and then the rest is there. `aside`: the
    step's change, that of its device time left out, of which delays on the host say nothing."""

    sensitivity: str
    step_us: float
    why_not: str
    phases: list[PhaseChange] = []
    foretold: Estimate | None = None
    aside: Estimate | None = None
    measured: Estimate | None = None


Values = Sequence[Sequence[float]]  # of each block, of each arm: us of a step


def foretell(
    found: Sensitivity,
    design: Design,
    blocks: Sequence[Block],
    interval: Values,
    device: Values,
    alpha: float,
    described: api.Description,
) -> Foretold:
    """By a sensitivity, the step that the changes of phases should give; `described`: the run's before arm.
    Raises BadSetting where the sensitivity is not of that arm, or there is too little."""
    if len(design.arms) < 2 or len(blocks) < 2:
        raise api.BadSetting("--sensitivity needs a run of a before and an after, of two trials or more")
    before, after = design.arms
    if (found.engine, found.toggles) != (before.engine, before.toggles):
        differ = sorted(dict(found.toggles.items() ^ before.toggles.items())) or ["engine"]
        raise api.BadSetting(
            f"{found.run} is not of the run's before arm: {', '.join(differ)} differ; measure it with the "
            "settings of that arm"
        )
    there = {"model": found.model, "device": without_k(found.device), **found.options}
    here = {
        "model": str(described.model["name"]),
        "device": without_k(described.device["kind"]),
        **what_counts(before),
    }
    here = {name: here[name] for name in there if name in here}
    there = {name: there[name] for name in here}
    if differ := [f"{name} {there[name]}, not {here[name]}" for name in there if there[name] != here[name]]:
        raise api.BadSetting(
            f"{found.run} is not of the run's before arm: it is of {' and '.join(differ)}; measure it with "
            "the settings of that arm"
        )
    of_steps = [each.phase for each in found.phases if each.phase in api.PHASES]
    names, why_not = changed(before, after, of_steps)
    phases = [each for each in found.phases if each.phase in names]
    known = {each.phase for each in phases} | {name for name, why in found.left_out.items() if why == ABSENT}
    if lacking := [name for name in names if name not in known]:
        why_not = f"the sensitivity does not say what {' and '.join(lacking)} costs"
    if why_not:
        return Foretold(sensitivity=found.run, step_us=found.step_us, why_not=why_not)
    deltas = np.array([_deltas(block, design, found.batch, phases) for block in blocks])  # blocks x phases
    each = [
        PhaseChange(
            phase=phase.phase,
            change=_estimate(mine, alpha),
            slope=phase.slope,
            felt_us=felt(phase, float(mine.mean())),
        )
        for phase, mine in zip(phases, deltas.T, strict=True)
    ]
    # What each us of a phase's change comes to, around the mean change.
    rates = np.array([one.felt_us / one.change.us if one.change.us else 0.0 for one in each])
    slopes = [(phase.slope_high - phase.slope_low) / 2 for phase in phases]
    uncertain = np.array([half if rate else 0.0 for half, rate in zip(slopes, rates, strict=True)])
    beside = float(np.hypot.reduce(uncertain * deltas.mean(axis=0), initial=0.0))
    whole, own = (np.diff(np.array(of, float), axis=1)[:, 0] for of in (interval, device))
    return Foretold(
        sensitivity=found.run,
        step_us=found.step_us,
        why_not="",
        phases=each,
        foretold=_estimate(deltas @ rates, alpha, beside),
        aside=_estimate(whole - own, alpha),
        measured=_estimate(whole, alpha),
    )


def changed(before: Arm, after: Arm, phases: Sequence[str]) -> tuple[Sequence[str], str]:
    """The phases whose time is what the arms differ in, or why there is more to it. Code that differs may
    have changed any of them."""
    if before.engine != after.engine or before.options != after.options:
        return (), "its arms differ in more than the time of host phases"
    spec = api.find_engines()[before.engine]
    of_toggles = {toggle.name: toggle.phases for toggle in spec.toggles}
    every = {**before.toggles, **after.toggles}
    differ = [name for name in every if before.toggles.get(name) != after.toggles.get(name)]
    others = [name for name in differ if not of_toggles.get(name)]
    if others:
        return (), f"{' and '.join(others)} changes more than how long a phase takes"
    named = [phase for name in differ for phase in of_toggles[name]]
    return (named or phases), ""


def felt(phase: Phase, longer_us: float) -> float:
    """What a step feels of a phase that takes so much longer (less than 0: shorter)."""
    if phase.gain_most or phase.slack_us is None:
        return phase.slope * longer_us if phase.gain_most or longer_us > 0 else 0.0
    return phase.slope * max(0.0, longer_us - phase.slack_us)


def _deltas(block: Block, design: Design, batch: int, phases: Sequence[Phase]) -> list[float]:
    """What each phase took longer in the after arm's decode steps of that batch, us."""
    means = []
    for arm in design.arms:
        steps = block.of(arm.name, "steps")
        steps = steps[(steps["kind"] == "decode") & (steps["batch"] == batch)] if len(steps) else steps
        if not len(steps):
            raise api.BadSetting(
                f"the rounds of {arm.name} have no decode step of the sensitivity's batch, {batch}"
            )
        times = phase_times(steps)
        means.append([float(times[phase_metric(each.phase)].mean()) for each in phases])
    return [later - earlier for earlier, later in zip(*means, strict=True)]


def _estimate(values: np.ndarray, alpha: float, beside: float = 0.0) -> Estimate:
    """Their mean over blocks and its interval. `beside`: half an interval of something else in it."""
    mean = float(values.mean())
    half = float(np.hypot(half_width(float(values.std(ddof=1)), len(values), alpha), beside))
    return Estimate(us=mean, low=mean - half, high=mean + half)
