"""From the stored blocks of a run to the object of `--format json`: effects, verdicts, outputs, mechanism,
limit, warnings. Pure: frames in, plain data out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engines import api
from harness import cautions, factorial, gate, metrics, outputs, prediction, stats
from harness.block import Block
from harness.design import Arm, Design, Factorial, Until
from harness.mechanism import mechanism, planted
from harness.spelling import ROW
from harness.store import SCHEMA_VERSION, Manifest

if TYPE_CHECKING:
    import pandas as pd

THROUGHPUTS = ("throughput_tok_s", "throughput_total_tok_s", "throughput_req_s")
ONE_BOOT = "undecided: one boot per side"  # boots differ: from one per side, nothing can be said
HELD = {"device": metrics.SAME_DEVICE, "host": metrics.SAME_HOST}  # where a delay is planted → what hides it
OFFERED = "offered_req_s"  # kept beside the metrics: the rate of the arrivals

Values = Mapping[str, Mapping[str, float]]  # arm → metric → the value of one block


def check_metrics(design: Design) -> None:
    """Raises BadSetting where a declared metric is unknown, or can't carry the verdict asked of it."""
    for name in (design.primary, *design.secondaries):
        api.pick(name, metrics.METRICS, "metric")
        if not metrics.METRICS[name].better:
            raise api.BadSetting(f"neither lower nor higher is better for {name}, so it can have no verdict")
        if name.startswith(("tpot", "itl")) and design.workload.most_new_tokens == 1:
            raise api.BadSetting(f"{name} needs at least 2 output tokens; raise --max-new-tokens")
        if name == "goodput_req_s" and not design.goodput:
            raise api.BadSetting("goodput_req_s needs to know what is good: give --goodput, such as ttft:200")
    if design.plant is not None and design.primary == HELD[design.plant_at]:
        raise api.BadSetting(
            f"{design.primary} takes the {design.plant_at} as equal in both arms, so it can't show a delay "
            f"planted there; choose another --primary or --plant-at"
        )
    if design.gate is not None:
        gate.check(gate.gated(design), design.gate.max_regression)
    if metrics.METRICS[design.primary].can_be_zero:
        raise api.BadSetting(
            f"{design.primary} can be zero, so a margin in percent means nothing; choose another --primary"
        )


def result(
    manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values] | None = None
) -> dict[str, Any]:
    """The object that `--format json` prints, for a run that measured `blocks` and then stopped. `per_block`:
    block_values of each, where they are at hand."""
    described = list(manifest.descriptions.values())
    design = manifest.design
    per_block = per_block or [block_values(design, block) for block in blocks]
    found = {
        "schema_version": SCHEMA_VERSION,
        "run": manifest.run,
        "device": described[0].device["kind"] if described else "unknown",
        "stopped_because": reason_to_stop(design, per_block) or f"ended after {len(blocks)} blocks",
        "comparisons": comparisons(manifest, blocks, per_block),
    }
    if design.factorial is not None:
        found["factorial"] = _effects_of(manifest, design.factorial, blocks, per_block)
    return found


def _effects_of(
    manifest: Manifest, planned: Factorial, blocks: Sequence[Block], per_block: Sequence[Values]
) -> dict[str, Any]:
    design = manifest.design
    check_values(design, per_block, [design.primary], ratio=True)
    values = measured(design, per_block)
    found = factorial.analyse(planned.factors, design.arms, values, design.primary, design.margin)
    judged = {
        factorial.label(each.term): each.weights for each in factorial.declared(planned.factors, design.arms)
    }
    return found | {
        "left_out": [{"name": each.name, "reason": each.reason} for each in planned.left_out],
        "warnings": cautions.of_factorial(manifest, blocks, values, judged),
    }


def comparisons(
    manifest: Manifest, blocks: Sequence[Block], per_block: Sequence[Values]
) -> list[dict[str, Any]]:
    """The first arm against each of the others. Where those are several, their verdicts form two families,
    each with Holm-adjusted p: those on the primary, and those on all secondaries together."""
    design = manifest.design
    if len(design.arms) <= 2:
        return [comparison(manifest, blocks, per_block)]
    first, *others = (arm.name for arm in design.arms)
    pairs = {other: manifest.pair(first, other) for other in others}
    values = {other: _of_two(blocks, per_block, (first, other)) for other in others}
    effects = {other: _effects(pair.design, values[other]) for other, pair in pairs.items()}
    adjusted: dict[str, dict[str, float]] = {other: {} for other in others}
    for family in ([design.primary], design.secondaries):
        raw = {
            (other, name): p for other, found in effects.items() for name, p in _family(found, family).items()
        }
        for (other, name), p in stats.holm(raw).items():
            adjusted[other][name] = p
    return [
        comparison(_named(pair, other), [block.only((first, other)) for block in blocks], values[other],
                   adjusted[other])
        for other, pair in pairs.items()
    ]  # fmt: skip


def of_pair(manifest: Manifest, blocks: Sequence[Block], before: str, after: str) -> dict[str, Any]:
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
) -> dict[str, Any]:
    """One comparison; with one arm `after` is null, and so is all but `before` of each metric.

    `confidence` is that of every interval: where a run may stop early, 1 - the level of its last look.
    `adjusted`: p by metric, where this is one of several comparisons; else the secondaries are adjusted
    among themselves.
    """
    design = manifest.design
    check_values(design, per_block, [design.primary])
    alpha = design.alpha(len(blocks))
    values = measured(design, per_block)
    effects = _effects(design, per_block)
    if adjusted is None:
        adjusted = _adjusted(design, effects)
    offered = offered_load(design, per_block)
    before, *after = design.arms_with_plant(manifest.plant_ns)
    did = mechanism(design, blocks)
    rows = {
        name: _judged_row(design, name, per_arm, effects.get(name), adjusted.get(name), offered, alpha)
        for name, per_arm in values.items()
    }
    verdict = rows[design.primary]["verdict"] if design.primary in rows else None
    return {
        "variant": design.name,
        "before": settings(before),
        "after": settings(after[0]) if after else None,
        "blocks": len(blocks),
        "confidence": 1 - alpha,
        "margin": design.margin,
        "primary": design.primary,
        "metrics": rows,
        "outputs": outputs.same(manifest, blocks),
        "failures": outputs.failures(design, blocks),
        "mechanism": did | planted(design, did, values),
        "limit": {
            name: design.sides({arm: float(np.mean(each)) for arm, each in values[name].items()})
            for name in ("device_busy", "exposed_host_us")
            if name in values
        },
        "prediction": prediction.predict(manifest, blocks, rows.get(prediction.METRIC)) if after else None,
        "warnings": [
            *(
                f"no verdict on {name}: it {where}"
                for name in design.secondaries
                if len(design.arms) > 1 and (where := lacking(design, per_block, name)) is not None
            ),
            *cautions.collect(manifest, blocks, values, effects.get(design.primary), verdict),
        ],
    }


def settings(arm: Arm) -> dict[str, Any]:
    """An arm as it stands in the result: everything but its name, and of its options those that are known."""
    plain: dict[str, Any] = msgspec.to_builtins(arm)
    if arm.known is not None:
        plain["options"] = {name: plain["options"][name] for name in arm.known}
    return {key: value for key, value in plain.items() if key not in ("name", "known")}


def reason_to_stop(design: Design, per_block: Sequence[Values]) -> str | None:
    """Why the run ends after these blocks; None where it goes on."""
    done, until = len(per_block), design.until
    if until is None:
        if done < design.blocks:
            return None
        return f"all {done} blocks done" if done > 1 else "its one block done"
    if done not in until.looks:
        return None
    if design.gate is not None:
        gated = judged(design, per_block, gate.gated(design), design.gate.max_regression)
        enough, found = _clear(gate.overall(gated), "the gate says")
    else:
        enough, found = _clear_primary(design, until, per_block)
    if enough:
        return f"decided at {done} of at most {design.blocks} blocks: {found}"
    return f"{done} blocks, the most allowed: {found}" if done == design.blocks else None


def _clear_primary(design: Design, until: Until, per_block: Sequence[Values]) -> tuple[bool, str]:
    """Whether the rule has enough of the primary, and what it found."""
    check_values(design, per_block, [design.primary], ratio=until.precision is not None)
    per_arm = measured(design, per_block)[design.primary]
    alpha = design.alpha(len(per_block))
    effect = _effect(design.primary, per_arm, alpha)
    if until.precision is None:
        found = stats.verdict(effect, design.margin, *_kind(design.primary), alpha=alpha)
        return _clear(found or "undecided", f"{design.primary} is")
    assert effect.low is not None
    assert effect.high is not None
    half = (effect.high - effect.low) / 2
    enough = half <= until.precision
    return enough, f"half-width {half:.2%}, {'' if enough else 'not '}within {100 * until.precision:.3g}%"


def _clear(verdict: str, subject: str) -> tuple[bool, str]:
    return verdict != "undecided", f"{subject} {verdict}"


def judged(
    design: Design, per_block: Sequence[Values], names: Sequence[str], limit: float
) -> dict[str, gate.Judged]:
    """What a gate says of these metrics after these blocks."""
    check_values(design, per_block, names)
    values = measured(design, per_block)
    rest = [name for name in names if not gate.is_gone(name, *values[name].values())]
    check_values(design, per_block, rest, ratio=True)
    offered = THROUGHPUTS if offered_load(design, per_block) else ()
    return gate.judge(values, names, limit, gate.level(design, len(per_block)), offered)


def check_values(
    design: Design, per_block: Sequence[Values], names: Sequence[str], ratio: bool = False
) -> None:
    """Raises EngineError where one of these metrics has nothing to compare in some block: no finite value,
    or, where its change has to be a `ratio`, none above zero. One arm alone is compared with nothing."""
    for name in names if len(design.arms) > 1 else ():
        if (where := lacking(design, per_block, name, ratio)) is not None:
            raise api.EngineError(f"{name} {where}, so it can't be compared")


def lacking(design: Design, per_block: Sequence[Values], name: str, ratio: bool = False) -> str | None:
    """Where a metric has nothing to compare, in words; None where every block of every arm has a value."""
    for number, values in enumerate(per_block):
        for arm in design.arms:
            value = values[arm.name].get(name, np.nan)
            if not np.isfinite(value):
                return f"has no value in block {number} of {arm.name}"
            if ratio and value <= 0:
                return f"is {value:g} in block {number} of {arm.name}"
    return None


def _kind(name: str) -> tuple[str, bool]:
    """Which way a metric is better, and whether it is a time."""
    metric = metrics.METRICS[name]
    return metric.better, metric.is_time


def measured(design: Design, per_block: Sequence[Values]) -> dict[str, dict[str, list[float]]]:
    """metric → arm → one value per block, for the metrics that the first arm has."""
    values = series(
        {arm.name: [each[arm.name] for each in per_block] for arm in design.arms}, metrics.METRICS
    )
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


def block_values(design: Design, block: Block) -> Values:
    """arm → metric → the value of one block; OFFERED with them."""
    found: dict[str, dict[str, float]] = {}
    for arm in design.arms:
        requests, steps_of_arm, rounds, work = (
            block.of(arm.name, name) for name in ("requests", "steps", "rounds", "work")
        )
        found[arm.name] = metrics.of_boot(requests, steps_of_arm, rounds, work, design.goodput)
        found[arm.name][OFFERED] = offered_rate(requests)
    matched = _matched(block, list(found))
    return {arm: values | matched[arm] for arm, values in found.items()}


def _matched(block: Block, arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """metrics.MATCHED of each of these arms, by the batches that all of them had; none where one of them has
    no step records, or is alone."""
    steps = [block.of(arm, "steps") for arm in arms]
    if len(steps) < 2 or not all(len(each) for each in steps):
        return {arm: {} for arm in arms}
    return dict(zip(arms, metrics.steps_matched(*steps), strict=True))


def _of_two(blocks: Sequence[Block], per_block: Sequence[Values], arms: Sequence[str]) -> list[Values]:
    """The values of two of several arms, as if the run had no others: matched by the batches of these two."""
    return [
        {arm: {**values[arm], **matched[arm]} for arm in arms}
        for block, values in zip(blocks, per_block, strict=True)
        for matched in [_matched(block, arms)]
    ]


def _effects(design: Design, per_block: Sequence[Values]) -> dict[str, stats.Effect]:
    """By metric, of two arms; nothing of one alone."""
    values = measured(design, per_block)
    alpha = design.alpha(len(per_block))
    return {name: _effect(name, per_arm, alpha) for name, per_arm in values.items() if len(per_arm) == 2}


def _effect(name: str, per_arm: Mapping[str, Sequence[float]], alpha: float) -> stats.Effect:
    before, after = per_arm.values()
    return stats.effect(before, after, scale_of(name, before, after), alpha)


def scale_of(name: str, before: Sequence[float], after: Sequence[float]) -> stats.Scale:
    positive = min(*before, *after) > 0
    return "ratio" if positive and not metrics.METRICS[name].can_be_zero else "difference"


def _adjusted(design: Design, effects: Mapping[str, stats.Effect]) -> dict[str, float]:
    """Holm-adjusted p of the declared secondaries."""
    return stats.holm(_family(effects, design.secondaries))


def _family(effects: Mapping[str, stats.Effect], names: Sequence[str]) -> dict[str, float]:
    """p of metrics that were declared together. One that could not be compared keeps its place in the family
    (p = 1): leaving it out would test the others at a laxer level. One block has no p at all."""
    found = {name: effects[name].p if name in effects else 1.0 for name in names}
    return {name: p for name, p in found.items() if p is not None}


def metric_row(name: str, before: Sequence[float], effect: stats.Effect | None) -> dict[str, Any]:
    """A metric of the result, not judged yet; without an effect there is one arm alone."""
    metric = metrics.METRICS[name]
    row: dict[str, Any] = dict.fromkeys(ROW)
    row |= {"unit": metric.unit, "better": metric.better}
    if effect is None:
        return row | {"before": float(np.mean(before))}
    return row | {
        "before": effect.before,
        "after": effect.after,
        "change": effect.change,
        "delta": effect.delta,
        "ci_low": effect.low,
        "ci_high": effect.high,
        "sd": effect.sd,
        "p": effect.p,
    }


def _judged_row(
    design: Design,
    name: str,
    per_arm: Mapping[str, Sequence[float]],
    effect: stats.Effect | None,
    p_adjusted: float | None,
    offered: bool,
    alpha: float,
) -> dict[str, Any]:
    row = metric_row(name, per_arm[design.arms[0].name], effect)
    declared = name == design.primary or name in design.secondaries
    if effect is not None and declared and not (name in THROUGHPUTS and offered):
        row["p_adjusted"] = p_adjusted
        row["verdict"] = stats.verdict(effect, design.margin, *_kind(name), p_adjusted, alpha)
        if any(arm.stays for arm in design.arms):
            row["verdict"] = ONE_BOOT
    return row


def offered_load(design: Design, per_block: Sequence[Values]) -> bool:
    """Whether throughput is what was offered rather than what the engine can do: arrivals by the clock, and
    at least 90% of their rate served in every block. It gets no verdict."""
    workload = design.workload
    if not workload.open_loop or workload.arrival_schedule == "relative":
        return False
    return all(
        values[arm.name].get("throughput_req_s", 0.0) >= 0.9 * values[arm.name].get(OFFERED, np.inf)
        for values in per_block
        for arm in design.arms
    )


def offered_rate(requests: pd.DataFrame) -> float:
    """Requests due per second, from the first due time of each round to its last; infinite where they are due
    all at once."""
    due = requests.groupby("round")["scheduled_ns"]
    seconds = float((due.max() - due.min()).sum()) / 1e9
    return (len(requests) - due.ngroups) / seconds if seconds else np.inf
