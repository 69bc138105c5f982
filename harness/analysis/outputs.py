"""What the arms of a run answered: how many outputs are the same, and how many requests failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from overlap_bench.harness.analysis.result import Failures, Outputs, Result
from overlap_bench.harness.metrics import digests, divergences
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.store.manifest import Manifest
from overlap_bench.harness.store.tables import Block
from overlap_bench.harness.workload.plan import different
from overlap_bench.harness.workload.workload import Workload

KEY = ["round", "request"]
FEW, OFTEN = 32, 4  # distinct outputs, and requests for each of them: so many requests show little more
IN_TWO_FORMS = "one arm's came as token ids, the other's as text; try the same count in both arms"
NONE_COMPARED = Outputs(compared=0, identical=0, near_ties=None, distinct=0)


def same(manifest: Manifest, blocks: Sequence[Block]) -> Outputs:
    """Requests whose output is the same in both arms, by digest; none is compared between two models, and no
    token ids with a text.

    One that failed in either arm has no output to compare: it is a failure, counted as such. `near_ties`: how
    many of the differing ones diverge at a near-tie of two tokens (metrics/divergences.py), whichever
    arm is listed first; null where they were not judged: that takes an engine that can score. `distinct`: how
    many different outputs the first arm gave; `weak` says where they are too few to show much.
    """
    import pandas as pd

    design = manifest.design
    # A server is asked for no model in particular: which it has, it says itself.
    described = (manifest.descriptions.get(arm.name) for arm in design.arms)
    models = {each.model.get("name") for each in described if each is not None}
    if len(design.arms) < 2 or len(models) > 1 or len({arm.options.model for arm in design.arms}) > 1:
        return NONE_COMPARED
    compared = identical = 0
    in_two_forms = False
    distinct: set[str] = set()
    for block in blocks:
        before, after = (
            block.of(arm.name, "requests")[[*KEY, "digest", "error"]].set_index(KEY) for arm in design.arms
        )
        before, after = before.align(after, join="inner", axis=0)
        answered = (before["error"] == "") & (after["error"] == "")
        can_be = answered & digests.comparable(before["digest"], after["digest"])
        in_two_forms |= not can_be.equals(answered)
        compared += int(can_be.sum())
        identical += int((can_be & (before["digest"] == after["digest"])).sum())
        distinct.update(before["digest"][can_be])
    names = [arm.name for arm in design.arms]
    parted = [divergences.between(block.tables["divergences"], names) for block in blocks]
    found = [table for table in parted if len(table)]
    counted = Outputs(
        compared=compared,
        identical=identical,
        near_ties=divergences.near_ties(pd.concat(found)) if found else None,
        distinct=len(distinct),
    )
    weak = IN_TWO_FORMS if in_two_forms else why_weak(counted, design.workload)
    return msgspec.structs.replace(counted, weak=weak)


def why_weak(found: Outputs, workload: Workload | None = None) -> str:
    """Why equal outputs show little, and what to try; "" where they show much, or differ. `workload`: what
    was asked, where that is known."""
    distinct = found.distinct
    if not distinct or found.identical < found.compared:
        return ""
    if distinct > 1 and (distinct >= FEW or OFTEN * distinct > found.compared):
        return ""
    few = "all are one text" if distinct == 1 else f"all are one of {distinct} texts"
    if workload is not None and asks_one(workload):
        return f"{few}, as every request asked the same prompt; try --prompts english"
    if workload is None or workload.files:
        return f"{few}; try --prompts english"
    tries = "a higher --max-new-tokens, or a model whose text depends on its prompt"
    return f"{few}, though prompts differ; try {tries}"


def asks_one(workload: Workload) -> bool:
    """Whether every request of a round asks the same prompt."""
    return workload.trace is None and workload.prompts is None and different(workload, 1) == 1


def failures(design: Design, blocks: Sequence[Block]) -> dict[str, Failures]:
    """By arm, how many requests failed, of how many, and how often each cause, the first one first."""
    counts = {arm.name: Counter[str]() for arm in design.arms}
    for block in blocks:
        for arm, errors in counts.items():
            errors.update(block.of(arm, "requests")["error"])
    found: dict[str, Failures] = {}
    for arm, errors in counts.items():
        causes = {error: count for error, count in errors.items() if error}
        found[arm] = Failures(failed=sum(causes.values()), requests=errors.total(), causes=causes)
    return found


def failed_shares(design: Design, blocks: Sequence[Block]) -> tuple[list[float], ...]:
    """By arm, the share of its requests that failed in each block."""
    return tuple(
        [float((block.of(arm.name, "requests")["error"] != "").mean()) for block in blocks]
        for arm in design.arms
    )


def outputs_differ(manifest: Manifest, result: Result) -> bool:
    return any(each.outputs.fail(manifest.promises_outputs) for each in result.comparisons)
