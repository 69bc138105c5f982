"""What a declared metric must be, to carry the verdict, or the gate, that is asked of it."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_bench.engines import api
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import MAX_SECONDARIES, Design

DEFAULT_LIMIT = 0.02
MOST_METRICS = MAX_SECONDARIES


def check(names: Sequence[str], limit: float) -> None:
    """Raises BadSetting where these metrics can't be gated by this limit."""
    for name in names:
        metric = api.pick(name, definitions.METRICS, "metric")
        if metric.can_be_zero or not metric.better:
            raise api.BadSetting(f"{name} has no regression in percent; choose another --metric")
    if len(set(names)) < len(names) or len(names) > MOST_METRICS:
        raise api.BadSetting(f"--metric takes up to {MOST_METRICS} different metrics")
    if not 0 < limit < 1:
        raise api.BadSetting(f"--max-regression must be above 0% and below 100%, not {100 * limit:.4g}%")


HELD = {
    "device": (definitions.SAME_DEVICE, definitions.SLICED_SAME_DEVICE),
    "host": (definitions.SAME_HOST, definitions.SLICED_SAME_HOST),
}  # where a delay is planted → what hides it


def check_split(design: Design, names: Sequence[str]) -> None:
    """Raises BadSetting where one of these metrics takes a device time for the device's own, and an engine's
    holds more, or there is none."""
    for name in names:
        for arm in design.arms if name in definitions.SPLIT else ():
            if arm.device_holds == "":
                continue
            why = f"its device time also holds {arm.device_holds}" if arm.device_holds else "it records none"
            raise api.BadSetting(
                f"{name} takes device time for the device's own, and with engine {arm.engine} {why}; "
                f"{definitions.SPLIT[name]} is the whole step"
            )


def check_metrics(design: Design) -> None:
    """Raises BadSetting where a declared metric is unknown, or can't carry the verdict asked of it."""
    for name in (design.primary, *design.secondaries):
        api.pick(name, definitions.METRICS, "metric")
        if not definitions.METRICS[name].better:
            raise api.BadSetting(f"neither lower nor higher is better for {name}, so it can have no verdict")
        of_a_step = definitions.of_a_step(name)
        if (of_a_step or name.startswith(("tpot", "itl"))) and design.workload.most_new_tokens == 1:
            raise api.BadSetting(f"{name} needs at least 2 output tokens; raise --max-new-tokens")
        if of_a_step and (silent := [arm.name for arm in design.arms if not arm.options.recorder]):
            raise api.BadSetting(f"{name} is made from step records, and {silent[0]} has recorder=off")
        if name == "goodput_req_s" and not design.goodput:
            raise api.BadSetting("goodput_req_s needs to know what is good: give --goodput, such as ttft:200")
    check_split(design, (design.primary, *design.secondaries))
    if design.plant is not None and design.primary in HELD[design.plant_at]:
        raise api.BadSetting(
            f"{design.primary} takes the {design.plant_at} as equal in both arms, so it can't show a delay "
            "that is injected there; choose another --primary or --inject-at"
        )
    if design.gate is not None:
        check(design.gated, design.gate.max_regression)
    if definitions.METRICS[design.primary].can_be_zero:
        raise api.BadSetting(
            f"{design.primary} can be zero, so a margin in percent means nothing; choose another --primary"
        )
