"""Every claim beside what was measured of it: what `bench variants --claims` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from overlap_bench.engines import api
from overlap_bench.harness.analysis.experiment_result import Change, ClaimResult
from overlap_bench.harness.analysis.result import Comparison, MetricRow, Result
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.variants import Unmeasured, Variant, measured_by

NOT_MEASURED, DESCRIPTIVE = "not measured", "descriptive"
STEPS = (SLICED, "round_step_ms")  # what says how long a step is, the best first


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A claim, and one measurement of it, or none. `reported` and the change with its interval are fractions;
    `reported` is there where the source has a number of what was measured. `step_ms` and `batch`: of the
    before arm's decode steps, the regime in which it was measured."""

    claim: str  # the variant that makes it testable; of one that has none, its own name
    title: str
    source: str
    says: str
    reported: float | None = None
    metric: str = ""
    change: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    confidence: float = 0.95  # of the interval
    verdict: str = NOT_MEASURED  # or how a reported number compares with the interval
    device: str = ""
    machine: str = ""
    step_ms: float | None = None
    batch: float | None = None
    found_in: str = ""  # below the results folder


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """All claims, in the order of variants.toml, the measurements of each in a row."""

    schema_version: int
    entries: list[Entry]


def of_variant(variant: Variant) -> Entry:
    return Entry(claim=variant.name, title=variant.title, source=variant.source, says=variant.claim)


def of_unmeasured(name: str, claim: Unmeasured) -> Entry:
    """A claim that nothing here can measure; what it would take stands in place of the verdict."""
    return Entry(
        claim=name,
        title=claim.title,
        source=claim.source,
        says=claim.claim,
        verdict=f"{NOT_MEASURED}: {claim.needs}",
    )


def of_run(variants: Mapping[str, Variant], result: Result, machine: str, found_in: str) -> Iterator[Entry]:
    """Each comparison of a run that measures a claim: arms that differ in toggles alone."""
    for comparison in result.comparisons:
        row, variant = comparison.decided, measured_by(variants, *comparison.toggled)
        if variant is not None and row is not None and row.change is not None:
            where = {"machine": machine, "found_in": found_in, "confidence": comparison.confidence}
            where |= regime(comparison)
            yield measured(variant, comparison.primary, row, result.device, **where)


def measured(variant: Variant, metric: str, row: MetricRow, device: str, **more: object) -> Entry:
    """A claim with its row of a comparison; `more`: further fields."""
    said = _of_whom(variant, row.verdict or DESCRIPTIVE)
    return msgspec.structs.replace(
        of_variant(variant),
        metric=metric,
        change=row.change,
        ci_low=row.ci_low,
        ci_high=row.ci_high,
        verdict=said,
        device=device,
        **more,
    )


def _of_whom(variant: Variant, verdict: str) -> str:
    """The verdict; where a side of the variant is our own rewriting of its source, it says so."""
    spec = api.find_engines().get(variant.engine)
    ours = spec is not None and any(each.rewritten for each in spec.toggles if each.name in variant.changes)
    return f"{verdict}; our rewriting, none on the source's own code" if ours else verdict


def of_claim(variant: Variant, claim: ClaimResult, device: str, **more: object) -> Entry | None:
    """What an experiment found of a source's number; None where that is no change."""
    if not isinstance(claim.measured, Change):
        return None
    change = claim.measured
    row = MetricRow(unit="", better="", change=change.value, ci_low=change.low, ci_high=change.high)
    entry = measured(variant, claim.metric, row, device, says=claim.says, reported=claim.reported, **more)
    return msgspec.structs.replace(entry, verdict=_of_whom(variant, claim.finding or DESCRIPTIVE))


def step_ms(metrics: Mapping[str, MetricRow], side: str = "before") -> float | None:
    return next((metrics[name].of(side) for name in STEPS if name in metrics), None)


def regime(comparison: Comparison, side: str = "before") -> dict[str, float | None]:
    """`step_ms` and `batch` of an entry, as they are in that arm."""
    counted = comparison.mechanism.get("mean_batch")
    batch = None if counted is None else counted.of(side)
    if comparison.sliced is not None:
        batch = comparison.sliced.batch
    return {"step_ms": step_ms(comparison.metrics, side), "batch": batch}


def regime_of_arm(comparisons: Sequence[Comparison], arm: int) -> dict[str, float | None]:
    """The same of a run's arm by its place: of a claim's own before, which need not be the run's first arm,
    that all others are compared with."""
    return regime(comparisons[arm - 1], "after") if arm else regime(comparisons[0])
