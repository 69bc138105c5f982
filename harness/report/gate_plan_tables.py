"""What `bench gate --calibrate` found, as a person reads it. Input is a `GatePlans`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from overlap_bench.harness.analysis.gate import MOST
from overlap_bench.harness.analysis.gate_plans import GatePlan, GatePlans
from overlap_bench.harness.common.formatting import blocks_of, minutes_of, share
from overlap_bench.harness.report.page import Page, Table, csv_of, markdown_page, tabulated
from overlap_bench.harness.store.files import append_step_summary, prepare, write_json, write_text


def conclusion(found: GatePlans) -> str:
    plan, within = found.recommended, minutes_of(found.max_minutes)
    if plan is None:
        return (
            f"No limit that was tried can be held on this {found.device} device within {within}: allow more "
            "with --max-minutes, or use a quieter machine."
        )
    metrics = " ".join(f"--metric {name}" for name in found.wanted or [plan.metric])
    return (
        f"On this machine: {metrics} --max-regression {share(plan.limit)} "
        f"--trials {plan.blocks} --max-minutes {found.max_minutes:.3g}, "
        f"about {_minutes(plan)} a gate, and {within} at most."
    )


def page(found: GatePlans) -> Page:
    doubts = [
        f"turns of this calibration are not believed, and nor would a gate's be while that goes on: "
        f"{found.doubt}; calibrate anew on a quieter machine"
    ]
    return Page(conclusion(found), (), (plan_table(found),), doubts if found.doubt else ())


def plan_table(found: GatePlans) -> Table:
    limits = sorted({plan.limit for plan in found.plans})
    by_place = {(plan.metric, plan.limit): plan for plan in found.plans}

    def cost(name: str, limit: float) -> str:
        plan = by_place.get((name, limit))
        return "–" if plan is None else f"{plan.blocks}, {_minutes(plan)}"

    columns: dict[str, Callable[[str], str]] = {
        "metric": str,
        "SD of a trial": lambda name: f"{found.sd[name]:.2%}",
    }
    columns |= {f"limit {share(limit)}": partial(cost, limit=limit) for limit in limits}
    note = (
        "How many trials (--trials), and how long, a gate needs to pass an unchanged head in 4 of 5 runs: by "
        f"{blocks_of(found.blocks)} of one arm against itself, {found.seconds_per_block:.0f} s each, and "
        f"the largest SD that these allow (90%). –: more than {MOST} trials. Without --trials, a gate ends "
        "after 3, 4, 5 or 6 trials, once it is clear."
    )
    return tabulated("Gates that this machine can hold", found.sd, columns, note, numbers=tuple(columns)[1:])


def to_csv(found: GatePlans) -> str:
    return csv_of(("run", "device"), GatePlan, (((found.run, found.device), plan) for plan in found.plans))


PLANS, SUMMARY = "calibration.json", "calibration.md"


def write(folder: Path, found: GatePlans, environment: Mapping[str, str] = os.environ) -> None:
    """In `folder`: calibration.json, for `bench gate --plan`, and calibration.md; on GitHub also the summary
    of the step. Raises BadSetting where there can be no such folder, and WriteFailed."""
    prepare(folder)
    write_json(folder / PLANS, found)
    text = markdown_page(page(found))
    write_text(folder / SUMMARY, text)
    append_step_summary(text + "\n", environment)  # the gate's comes below


def _minutes(plan: GatePlan) -> str:
    return f"{60 * plan.minutes:.0f} s" if plan.minutes < 1.5 else f"{plan.minutes:.0f} min"
