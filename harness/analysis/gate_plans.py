"""What a gate can decide on this machine, and in how many minutes: from an arm measured against itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from overlap_bench.harness.analysis.gate import MOST
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.verdict_warnings import Contradicted, TurnsNotBelieved
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import ONE_SIDED
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.stats import planning

METRICS = (definitions.SLICED, "tpot_ms_p50", "itl_token_ms_p99", "ttft_ms_p50", "throughput_tok_s")
LIMITS = (0.005, 0.01, 0.02, 0.05, 0.1)
FEWEST = 3  # blocks: a gate looks at no fewer
MINUTES = 3.0  # a gate may take, unless it is said


class GatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate on one metric needs to pass an unchanged head in 4 of 5 runs, or more."""

    metric: str
    limit: float  # the largest regression allowed, a fraction
    blocks: int = msgspec.field(name="trials")
    minutes: float  # its first boots included


class GatePlans(msgspec.Struct, frozen=True, kw_only=True):
    """`sd`: by metric, of the log ratio of equal arms over the blocks that were measured. `plans`: every
    limit that can be held, by metric, the smallest first. `recommended`: the smallest limit within
    `max_minutes`, at which a gate that takes longer than planned is to end; of several metrics that a gate is
    wanted for, the slowest of its plans."""

    schema_version: int
    run: str
    device: str
    blocks: int = msgspec.field(name="trials")
    seconds_per_block: float = msgspec.field(name="seconds_per_trial")
    max_minutes: float
    sd: dict[str, float]
    plans: list[GatePlan]
    recommended: GatePlan | None
    wanted: list[str] = []  # the metrics that a gate is wanted for, where that is known
    doubt: str = ""  # why turns were not believed: for as long as that goes on, no gate on them is decided


def of_equal_arms(
    found: Result,
    seconds: float,
    minutes: float | None,
    metrics: Sequence[str],
    limit: float | None,
    offered: Sequence[str] = (),
) -> GatePlans:
    """From the result of an A/A that took so many `seconds`. `metrics`, `limit`: those that a gate is wanted
    for, where that is known; else METRICS and LIMITS. `offered`: metrics that are the offered load, so that a
    gate on them, steady as they are, would never be decided.

    Blocks are those of a fixed gate, for the upper end of what the SD may be (planning.blocks_needed): few
    blocks know their own SD badly, and a gate that cannot decide is worth less than one that takes longer.
    """
    comparison = found.comparisons[0]
    doubts = [each.why for each in comparison.warnings if isinstance(each, Contradicted | TurnsNotBelieved)]
    measured = comparison.blocks + len(comparison.left_out)
    each = seconds / (measured + 1)  # the first boots, which are thrown away, are nearly a block
    named = [name for name in metrics or METRICS if name not in offered]
    rows = {name: comparison.metrics[name] for name in named if name in comparison.metrics}
    sds = {name: row.sd for name, row in rows.items() if row.sd is not None and row.change is not None}
    plans = []
    for name, sd in sds.items():
        for most in LIMITS if limit is None else (limit,):
            lower = definitions.METRICS[name].better == "lower"
            margin = float(np.log1p(most) if lower else -np.log1p(-most))
            worst = planning.highest_sd(sd, comparison.blocks)
            blocks = max(FEWEST, planning.fixed_plan(worst, margin, alpha=2 * ONE_SIDED))
            if blocks <= MOST:
                plans.append(
                    GatePlan(metric=name, limit=most, blocks=blocks, minutes=(blocks + 1) * each / 60)
                )
    within = MINUTES if minutes is None else minutes
    fitting = [plan for plan in plans if plan.minutes <= within]
    return GatePlans(
        schema_version=found.schema_version,
        run=found.run,
        device=found.device,
        blocks=comparison.blocks,
        seconds_per_block=each,
        max_minutes=within,
        sd=sds,
        plans=plans,
        wanted=list(named if metrics else ()),
        doubt=doubts[0] if doubts else "",
        recommended=max(smallest(plans, named, within), key=lambda plan: plan.blocks, default=None)
        if metrics
        else min(fitting, key=lambda plan: (plan.limit, plan.blocks), default=None),
    )


def smallest(
    plans: Sequence[GatePlan], names: Sequence[str], minutes: float, limit: float | None = None
) -> list[GatePlan]:
    """The plans of these metrics at the smallest limit that each of them holds within the minutes; none where
    there is no such limit. Where a `limit` is given: at that, or the next below that was planned."""
    limits = sorted({plan.limit for plan in plans})
    if limit is not None:
        limits = [each for each in limits if each <= limit][-1:]
    for each in limits:
        found = [plan for plan in plans if plan.limit == each and plan.metric in names]
        if {plan.metric for plan in found if plan.minutes <= minutes} == set(names):
            return found
    return []


def applied(
    found: GatePlans, request: Request, names: Sequence[str], limit: float | None
) -> tuple[Request, Sequence[str], float | None]:
    """A gate as it was recommended: the request with its blocks and its minutes at most, its metrics and its
    limit; but what was asked for stays: of several metrics, the smallest limit that each of them holds. Where
    nothing could be recommended, the minutes alone."""
    design: dict[str, object] = {"max_minutes": found.max_minutes}
    names = tuple(names) or tuple(found.wanted)
    if names:
        plans = smallest(found.plans, names, found.max_minutes, limit)
    else:
        plans = [] if found.recommended is None else [found.recommended]
    if plans:
        names = tuple(names) or (plans[0].metric,)
        limit = plans[0].limit if limit is None else limit
        if not request.until_decided:
            design["blocks"] = max(plan.blocks for plan in plans)
    return msgspec.structs.replace(request, design={**design, **request.design}), names, limit
