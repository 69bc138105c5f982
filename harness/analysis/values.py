"""The values of a run's blocks: those of one, in series, what they lack, whether they can be compared, what
they show so far, and whether they are enough by the rule that was declared before the first block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from overlap_bench.engines import api
from overlap_bench.harness.analysis import decision, turns
from overlap_bench.harness.analysis.result import Judged, MetricRow
from overlap_bench.harness.analysis.words import difference, interval
from overlap_bench.harness.metrics import definitions, slices
from overlap_bench.harness.metrics.block import OFFERED, Values, of_block
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.stats import paired
from overlap_bench.harness.stats.stopping import ALPHA, Until
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.workload.arrivals import ARRIVALS

# A request with one chunk, as of a reply that came all at once, has no times between tokens.
STREAMED = ("tpot_ms_", "itl_")
NOT_STREAMED = (
    ": its requests got one token each, or all their tokens at once, as through a proxy that buffers; "
    "--primary latency_ms_p50 compares all the same"
)
TURNS = ": too few turns of both arms ran the same steps; --interleaved-rounds 0 compares by rounds"
THROUGHPUTS = ("throughput_tok_s", "throughput_total_tok_s", "throughput_req_s")
FEWEST_CALM = 6  # trials whose turns were undisturbed, for the others to be left out
Series = Mapping[str, Mapping[str, Sequence[float]]]  # metric → arm → one value per block


class NoValue(api.EngineError):
    """A metric has nothing to compare in some trial."""


def check_values(
    design: Design, per_block: Sequence[Values], names: Sequence[str], ratio: bool = False
) -> None:
    """Raises NoValue where one of these metrics has nothing to compare in some block: no finite value,
    or, where its change has to be a `ratio`, none above zero. One arm alone is compared with nothing."""
    for name in names if len(design.arms) > 1 else ():
        if (where := lacking(design, per_block, name, ratio)) is not None:
            advice = TURNS if name in definitions.OF_PAIRS else ""
            advice = NOT_STREAMED if name.startswith(STREAMED) else advice
            raise NoValue(f"{name} {where}, so it can't be compared{advice}")


def lacking(design: Design, per_block: Sequence[Values], name: str, ratio: bool = False) -> str | None:
    """Where a metric has nothing to compare, in words; None where every block of every arm has a value."""
    for number, values in enumerate(per_block):
        for arm in design.arms:
            value = values[arm.name].get(name, np.nan)
            if not np.isfinite(value):
                return f"has no value in trial {number} of {arm.name}"
            if ratio and value <= 0:
                return f"is {value:g} in trial {number} of {arm.name}"
    return None


def measured(
    design: Design, per_block: Sequence[Values], names: Iterable[str] = definitions.METRICS
) -> dict[str, dict[str, list[float]]]:
    """metric → arm → one value per block, for those of these metrics that the first arm has, and that mean
    in these engines what they say."""
    told = (name for name in names if design.splits_steps or name not in definitions.SPLIT)
    values = series({arm.name: [each[arm.name] for each in per_block] for arm in design.arms}, told)
    return {name: per_arm for name, per_arm in values.items() if design.arms[0].name in per_arm}


def series(
    per_arm: Mapping[str, Sequence[Mapping[str, float]]], names: Iterable[str]
) -> dict[str, dict[str, list[float]]]:
    """name → arm → one value per block, from each arm's values block by block. What has no finite value in
    some block of an arm is left out for that arm: a mean over other blocks would compare different things."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        for arm, blocks in per_arm.items():
            values = [float(each.get(name, np.nan)) for each in blocks]
            if values and np.isfinite(values).all():
                found.setdefault(name, {})[arm] = values
    return found


def counted(design: Design, per_block: Sequence[Values], names: Sequence[str]) -> list[int]:
    """Places of the blocks that decide about these metrics. All, but where one is of turns, and FEWEST_CALM
    blocks or more had enough undisturbed turns: then these alone. No change makes other processes compute,
    so this chooses no result. The blocks that are left out would bend the interval: an arm may suffer more
    from a neighbour than the change is worth (experiments/validation/simulated_turns.py)."""
    everything = [*range(len(per_block))]
    if not any(definitions.METRICS[name].of_turns for name in names):
        return everything
    calm = [place for place in everything if slices.believed(per_block[place])]
    return calm if len(calm) >= FEWEST_CALM else everything


def block_values(design: Design, block: Block) -> Values:
    """arm → metric → the value of one block of that design; OFFERED with them."""
    if block.values is not None:
        return block.values
    return of_block(block.of, [arm.name for arm in design.arms], design.goodput)


def block_seconds(blocks: Sequence[Block]) -> float | None:
    """How long a block takes with its boots: the median time from the first round of one to that of the next,
    which a pause before a resumed block does not move; of a cluster, from one to the next of the same node,
    whose clock is its own. None where it is not known."""
    starts: dict[str, list[float]] = {}
    for each in blocks:
        starts.setdefault(each.node, []).append(float(each.tables["rounds"]["started_ns"].min()))
    apart = np.concatenate([np.diff(own) for own in starts.values()]) if starts else np.empty(0)
    apart = apart[apart > 0]  # the clock starts again with the machine, and an import has none
    return float(np.median(apart)) / 1e9 if len(apart) else None


def scale_of(name: str, *series: Sequence[float]) -> paired.Scale:
    """The scale of a metric, or of a counter."""
    can_be_zero = name in definitions.METRICS and definitions.METRICS[name].can_be_zero
    return "ratio" if min(map(min, series)) > 0 and not can_be_zero else "difference"


def effect_of(name: str, per_arm: Mapping[str, Sequence[float]], alpha: float) -> paired.Effect:
    before, after = per_arm.values()
    return paired.effect(before, after, scale_of(name, before, after), alpha)


def offered_load(design: Design, per_block: Sequence[Values]) -> bool:
    """Whether throughput is what was offered rather than what the engine can do: arrivals by the clock, and
    at least 90% of their rate served in every block. It gets no verdict."""
    workload = design.workload
    if not ARRIVALS[workload.arrival].open_loop or workload.arrival_schedule == "relative":
        return False
    return all(
        values[arm.name].get("throughput_req_s", 0.0) >= 0.9 * values[arm.name].get(OFFERED, np.inf)
        for values in per_block
        for arm in design.arms
    )


def enough(design: Design, per_block: Sequence[Values]) -> bool:
    """Whether the rule stops the run after these blocks. Raises EngineError for a metric that the first block
    can't give, rather than once all are done."""
    if design.until is None and len(per_block) > 1:
        return False
    check_values(design, per_block, design.gated)
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

        said = gate.overall(judged(design, per_block, design.gated, design.gate.max_regression))
        enough, found = said != "undecided", f"the gate says {said}"
        if said == "pass" and fails_more(design, per_block):  # more trials tell whether by chance
            enough, found = False, "the gate says pass, but in after more requests fail than it may let pass"
    else:
        enough, found = _enough_of_primary(design, until, per_block)
    alpha = design.alpha(done) if design.gate is None else 2 * design.one_sided(done)
    if enough and until.precision is None and (why := doubted(design, per_block, alpha)) is not None:
        enough, found = False, f"{found}, which other measurements contradict: {why.partition(';')[0]}"
    if enough:
        return f"decided at {done} of at most {design.blocks} trials: {found}"
    return f"{done} trials, the most allowed: {found}" if done == design.blocks else None


def _enough_of_primary(design: Design, until: Until, per_block: Sequence[Values]) -> tuple[bool, str]:
    check_values(design, per_block, [design.primary], ratio=until.precision is not None)
    alpha = design.alpha(len(per_block))
    per_block = [per_block[place] for place in counted(design, per_block, design.gated)]
    effect = effect_of(design.primary, measured(design, per_block, [design.primary])[design.primary], alpha)
    if until.precision is None:
        metric = definitions.METRICS[design.primary]
        said = decision.verdict(effect, design.margin, metric.better, metric.is_time, alpha=alpha)
        said = said or "undecided"
        return said != "undecided", f"{design.primary} is {said}"
    assert effect.low is not None
    assert effect.high is not None
    half = (effect.high - effect.low) / 2
    enough = half <= until.precision
    return enough, f"half-width {half:.2%}, {'' if enough else 'not '}within {100 * until.precision:.3g}%"


def fails_more(design: Design, per_block: Sequence[Values]) -> bool:
    """Whether more requests failed in the after arm than a gate lets pass, or may have."""
    from overlap_bench.harness.analysis import gate

    assert design.gate is not None
    requests = design.rounds * design.workload.num_requests
    before, after = (
        [values[arm.name].get("failed_requests", 0.0) / requests for values in per_block]
        for arm in design.arms[:2]
    )
    level = design.one_sided(len(per_block))
    return gate.more_failed(before, after, design.gate.max_regression, level) != "pass"


def doubted(design: Design, per_block: Sequence[Values], alpha: float) -> str | None:
    """Why turns are not believed after these blocks, so that a run which may go on does; None where nothing
    speaks against them, or where they do not decide."""
    if not any(definitions.METRICS[name].of_turns for name in design.gated):
        return None
    deciding = [per_block[place] for place in counted(design, per_block, design.gated)]
    return turns.disagreement(design, deciding, alpha)


def so_far(design: Design, per_block: Sequence[Values]) -> str:
    """The primary's change with its 95% interval, in words; "" where two arms, two blocks or a value are
    missing. For whoever watches a run: it decides nothing."""
    per_block = [per_block[place] for place in counted(design, per_block, design.gated)]
    per_arm = measured(design, per_block, [design.primary]).get(design.primary, {})
    if len(per_block) < 2 or len(design.arms) != 2 or len(per_arm) != 2:
        return ""
    effect = effect_of(design.primary, per_arm, ALPHA)
    row = MetricRow.of_metric(design.primary, per_arm[design.arms[0].name], effect)
    return f"{design.primary} {difference(row)} {interval(row)}"


def judged(
    design: Design, per_block: Sequence[Values], names: Sequence[str], limit: float
) -> dict[str, Judged]:
    from overlap_bench.harness.analysis import gate

    check_values(design, per_block, names)
    level = design.one_sided(len(per_block))
    per_block = [per_block[place] for place in counted(design, per_block, names)]
    values = measured(design, per_block)
    rest = [name for name in names if not gate.is_gone(name, *values[name].values())]
    check_values(design, per_block, rest, ratio=True)
    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    return gate.judge(values, names, limit, level, offered)
