"""What the change did, by the engine's own counters and steps, and how far each arm is from the limit: the
part of a comparison that shows why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis.result import Comparison, Counter, Settings, Sides
from overlap_bench.harness.common import names
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.steps import decode_intervals, matched_share
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.store.tables import Block

MATCHED_UNIT = "of the decode steps, at a batch that both arms had"
COUNTER = "counter."  # columns of the rounds table that are mechanism counters
LIMITS = ("device_busy", "exposed_host_us")
OF_STEPS = ["kind", "batch", "dropped", "preempted"]  # what is counted of a step's record


def mechanism(design: Design, blocks: Sequence[Block]) -> dict[str, Counter]:
    """What the toggles did: each counter per step (per round where an arm has no step records; per step of a
    kind where its name begins with that), the mean batch, steps by kind, preemptions and dropped rows per
    round."""
    steps: dict[str, list[pd.DataFrame]] = {arm.name: [] for arm in design.arms}
    matched = []
    for block in blocks:
        own = [block.of(arm, "steps") for arm in steps]
        for parts, records in zip(steps.values(), own, strict=True):
            parts += [records[OF_STEPS]] if len(records) else []
        if len(own) == 2 and all(map(len, own)):
            matched.append(matched_share([decode_intervals(each) for each in own]))
    per_step = all(len(parts) == len(blocks) for parts in steps.values())
    rounds = pd.concat([block.tables["rounds"] for block in blocks])
    per_arm = {arm: _of_arm(rounds[rounds["arm"] == arm], each, per_step) for arm, each in steps.items()}
    units = {name: unit for found in per_arm.values() for name, (_, unit) in found.items()}
    counters = {}
    for name in dict.fromkeys(name for found in per_arm.values() for name in found):
        both = _sides(design, {arm: found[name][0] for arm, found in per_arm.items() if name in found})
        counters[name] = Counter(before=both.before, after=both.after, unit=units[name])
    if per_step and matched:
        before, after = map(float, np.mean(matched, axis=0))
        if np.isfinite(before) and np.isfinite(after):
            counters["matched_steps"] = Counter(before=before, after=after, unit=MATCHED_UNIT)
    return counters


def _of_arm(
    rounds: pd.DataFrame, parts: Sequence[pd.DataFrame], per_step: bool
) -> dict[str, tuple[float, str]]:
    """Each counter and its unit. `parts`: OF_STEPS of each block that has step records."""
    found: dict[str, tuple[float, str]] = {}
    steps = pd.concat(parts) if parts else pd.DataFrame(columns=OF_STEPS)
    kinds = steps["kind"].value_counts().to_dict()
    if parts:
        decoding = int(steps.loc[steps["kind"] == "decode", "batch"].sum())
        found["mean_batch"] = (decoding / max(1, kinds.get("decode", 0)), "requests per decode step")
        for kind in (*api.STEP_KINDS, "dropped"):
            if kind != "mixed" or kind in kinds:  # most engines never have one
                found[f"{kind}_steps"] = (kinds.get(kind, 0) / len(rounds), "per round")
        found["dropped_rows"] = (int(steps["dropped"].sum()) / len(rounds), "per round")
        found["preempted"] = (int(steps["preempted"].sum()) / len(rounds), "requests per round")
    per, unit = (len(steps), "per step") if per_step else (len(rounds), "per round")
    for column in rounds.columns:
        name = names.of_today(column.removeprefix(COUNTER))
        # Where both have one name (dropped_rows), the step records' stands, per round.
        if column.startswith(COUNTER) and name not in found and rounds[column].notna().any():
            kind = name.partition("_")[0]
            if per_step and kind in kinds:
                found[name] = (float(rounds[column].sum()) / kinds[kind], f"per {kind} step")
            else:
                found[name] = (float(rounds[column].sum()) / per, unit)
    return found


def _sides(design: Design, by_arm: Mapping[str, float]) -> Sides:
    """The value of the before and of the after arm; None where there is none."""
    after = by_arm.get(design.arms[1].name) if len(design.arms) == 2 else None
    return Sides(before=by_arm.get(design.arms[0].name), after=after)


def limits(design: Design, values: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Sides]:
    """How far the rest is from the limit: LIMITS of each arm, means over blocks."""
    return {
        name: _sides(design, {arm: float(np.mean(each)) for arm, each in values[name].items()})
        for name in LIMITS
        if name in values
    }


def planted(
    design: Design,
    counters: Mapping[str, Counter],
    values: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, Counter]:
    """How much of the before arm's mean decode step the injected delay really took, by the engine's counter:
    {"injected_share": row}, or nothing where there was none. Where turns decide, of the step in turns: in
    rounds it has another batch, and prefills beside it, and the same delay is another share."""
    counter = counters.get(f"injected_{design.plant_at}_ns")
    step = design.primary if design.primary in definitions.OF_PAIRS else definitions.MATCHED[0]
    steps = values.get(step, {}).get(design.arms[0].name)
    if design.plant is None or counter is None or steps is None:
        return {}
    step_ns = float(np.mean(steps)) * definitions.NS_PER_MS
    before, after = (each and each / step_ns for each in (counter.before, counter.after))
    return {"injected_share": Counter(before=before, after=after, unit="of a step of before")}


def planted_share(comparison: Comparison) -> float | None:
    """The delay that was really injected (`--inject-delay`), by the engine's counter, as a share of the
    before arm's mean decode step. The before arm's own reading, near zero, is the hook's cost and is
    subtracted. None without a delay."""
    row = comparison.mechanism.get("injected_share")
    if row is None or row.before is None or row.after is None:
        return None
    return row.after - row.before


def expected_change(share: float, better: str) -> float:
    """The change in a time, or in a rate, from a step longer by `share`, where nothing absorbs it."""
    return share if better == "lower" else 1 / (1 + share) - 1


def differ_by_plant_alone(comparison: Comparison) -> bool:
    """Whether the arms differ in nothing but the injected delay, so that their change is its."""

    def without(side: Settings) -> Settings:
        options = {name: each for name, each in side.options.items() if name not in ("plant_at", "plant_ns")}
        return msgspec.structs.replace(side, options=options)

    before, after = comparison.before, comparison.after
    return after is not None and without(before) == without(after)


def plant_seen(comparison: Comparison) -> bool:
    """The primary got worse, and its interval holds what was planted."""
    share, row = planted_share(comparison), comparison.metrics[comparison.primary]
    if share is None or row.ci_low is None or row.ci_high is None:
        return False
    inside = row.ci_low <= expected_change(share, row.better) <= row.ci_high
    return row.verdict in ("slower", "worse") and inside
