"""What the first screen of a comparison says in fewer words, or alone."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from overlap_bench.harness.analysis.result import Comparison
from overlap_bench.harness.analysis.words import confidence, difference, interval
from overlap_bench.harness.plan.variants import load_variants, measured_by
from overlap_bench.harness.report import findings, tables
from overlap_bench.harness.report.page import Table

ROWS = ("ttft_ms_p50", "tpot_ms_p50", "throughput_tok_s")  # below what has a verdict
MOST_COUNTERS = 4
NO_CLAIM = "none"  # how the claim of a variant begins whose source has none
NOTE = "{confidence}% intervals over trials; change = after/before − 1; --all shows more.{rounds}"


def claimed(comparison: Comparison) -> str | None:
    """What the source of this change says today, and what was measured of the same metrics; None where no
    variant makes the change, or its source says nothing. No part of the result: a stored one has it not."""
    variant = measured_by(load_variants(), *comparison.toggled)
    if variant is None or variant.claim.startswith(NO_CLAIM):
        return None
    rows = {name: comparison.metrics[name] for name in variant.claimed if name in comparison.metrics}
    if not rows:
        return f"The source: {variant.claim}."
    ours = ", ".join(f"{name} {difference(row)} {interval(row)}".rstrip() for name, row in rows.items())
    # Else a number like the source's would be read as its confirmation.
    open_still = "" if any(row.excludes_zero for row in rows.values()) else ": not settled"
    where = "" if comparison.sliced is None else " in rounds"
    return f"The source: {variant.claim}; ours{where}: {ours}{open_still}."


def metric_table(comparison: Comparison) -> Table:
    """The table of the primary and what else has a verdict, TTFT, TPOT and throughput."""
    judged = [name for name, row in comparison.metrics.items() if row.verdict is not None]
    chosen = {comparison.primary, *judged, *ROWS}
    shown = {name: row for name, row in comparison.metrics.items() if name in chosen}
    note = NOTE.format(confidence=confidence(comparison.confidence), rounds=tables.of_rounds(comparison))
    return replace(tables.metric_table(structs.replace(comparison, metrics=shown)), note=note)


def mechanism_table(comparison: Comparison) -> Table | None:
    """What the toggle did, and the limit."""
    telling = list(findings.mechanism(comparison.mechanism).items())[:MOST_COUNTERS]
    title = "Mechanism and limit" if comparison.sliced is None else "Mechanism and limit, in rounds"
    return tables.sides_table(title, {**dict(telling), **tables.limit(comparison)}, comparison)
