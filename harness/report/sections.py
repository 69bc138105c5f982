"""The sections of a report of a comparison. The first screen, the whole in a terminal, markdown and the web
page show them in this order: the lines under the verdict, the tables below.

To add one: a function that says it of a comparison, in a file of its own, and a line in SECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from overlap_bench.harness.analysis.result import Comparison, Result
from overlap_bench.harness.analysis.words import conclusion, confidence, difference, interval
from overlap_bench.harness.plan.variants import load_variants, measured_by
from overlap_bench.harness.report import findings, tables
from overlap_bench.harness.report.page import Page, Table
from overlap_bench.harness.report.request_times import request_times

ROWS = ("ttft_ms_p50", "tpot_ms_p50", "throughput_tok_s")  # below what has a verdict
MOST_COUNTERS = 4
NO_CLAIM = "none"  # how the claim of a variant begins whose source has none
NOTE = "{confidence}% intervals over trials; change = after/before − 1; --all shows more.{rounds}"

Say = Callable[[Comparison], str | Table | None]  # None: there is nothing to say


@dataclass(frozen=True, slots=True)
class Section:
    """A line or a table: `whole` of a full report, `brief` of the first screen; None where it isn't shown."""

    whole: Say | None = None
    brief: Say | None = None


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


def first_metrics(comparison: Comparison) -> Table:
    """The primary and what else has a verdict, TTFT, TPOT and throughput."""
    judged = [name for name, row in comparison.metrics.items() if row.verdict is not None]
    chosen = {comparison.primary, *judged, *ROWS}
    shown = {name: row for name, row in comparison.metrics.items() if name in chosen}
    note = NOTE.format(confidence=confidence(comparison.confidence), rounds=tables.of_rounds(comparison))
    return replace(tables.metric_table(structs.replace(comparison, metrics=shown)), note=note)


def first_counters(comparison: Comparison) -> Table | None:
    """What the toggle did, and the limit."""
    telling = list(findings.mechanism(comparison.mechanism).items())[:MOST_COUNTERS]
    title = "Mechanism and limit" if comparison.sliced is None else "Mechanism and limit, in rounds"
    return tables.sides_table(title, {**dict(telling), **tables.limit(comparison)}, comparison)


SECTIONS = (
    Section(brief=claimed),
    Section(tables.changed_code, tables.changed_code),
    Section(tables.overlaid, tables.overlaid),
    Section(tables.in_turns, tables.in_turns),
    Section(tables.step_parts, tables.step_parts),
    Section(tables.planted, tables.planted),
    Section(tables.detectable, tables.detectable),
    Section(tables.scatter),
    Section(tables.outputs_line, tables.outputs_line),
    Section(tables.metric_table, first_metrics),
    Section(tables.failures_table, tables.failures_table),
    Section(tables.nodes_table),
    Section(request_times),
    Section(tables.mechanism_table, first_counters),
    Section(tables.limit_table),
)


def pages(result: Result, whole: bool = True) -> list[Page]:
    """One for each comparison; of one arm alone, which is short, always all of it."""
    whole = whole or any(each.after is None for each in result.comparisons)
    return [page(result, each, whole) for each in result.comparisons]


def page(result: Result, comparison: Comparison, whole: bool = True) -> Page:
    said = [say(comparison) for each in SECTIONS if (say := each.whole if whole else each.brief)]
    expected = not whole and result.stopped_because.startswith("all ")
    lines = [
        *findings.leading(comparison),
        tables.changed_settings(comparison.before, comparison.after),
        *([] if expected else [tables.stopped(result)]),
        *(each for each in said if isinstance(each, str)),
    ]
    return Page(
        conclusion(result.device, comparison),
        tuple(lines),
        tuple(each for each in said if isinstance(each, Table)),
        findings.warned(comparison.warnings, whole),
    )
