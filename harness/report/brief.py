"""What a terminal shows of a comparison, unless all of it is asked for: the answer, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overlap_bench.harness.analysis.result import Comparison, Counter, Result
from overlap_bench.harness.analysis.warnings import Severity
from overlap_bench.harness.analysis.words import conclusion, confidence, difference, interval
from overlap_bench.harness.plan.variants import load_variants, measured_by
from overlap_bench.harness.report import findings, tables
from overlap_bench.harness.report.page import Page, Table

ROWS = ("ttft_ms_p50", "tpot_ms_p50", "throughput_tok_s")  # below what has a verdict
MOST_COUNTERS, MOST_WARNINGS = 4, 3
NO_CLAIM = "none"  # how the claim of a variant begins whose source has none
NOTE = "{confidence}% intervals over trials; change = after/before − 1; --all shows more.{rounds}"


def pages(result: Result) -> Iterator[Page]:
    """One for each comparison, a gate's verdict before it. One arm alone is shown whole."""
    if any(each.after is None for each in result.comparisons):
        yield from tables.pages(result)
        return
    if result.gate is not None:
        from overlap_bench.harness.report import gate_tables

        judged, *more = gate_tables.parts(result)
        lines = tuple(gate_tables.late(result))
        yield Page(gate_tables.conclusion(result), lines, (_without_note(judged), *more), ())
    for each in result.comparisons:
        yield page(result, each)


def page(result: Result, comparison: Comparison) -> Page:
    ended = result.stopped_because
    lines = [
        *findings.leading(comparison),
        tables.changed_settings(comparison.before, comparison.after),
        *filter(None, [claimed(comparison)]),
        *([] if ended.startswith("all ") else [tables.stopped(result)]),
        *tables.remarks(comparison),
        tables.outputs_line(comparison.outputs),
    ]
    return Page(
        conclusion(result.device, comparison),
        tuple(lines),
        tuple(_parts(comparison)),
        _warnings(comparison),
    )


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


def _parts(comparison: Comparison) -> Iterator[Table]:
    """The metrics; what the toggle did, and the limit, in one table."""
    shown = {name: row for name, row in comparison.metrics.items() if name in _chosen(comparison)}
    note = NOTE.format(confidence=confidence(comparison.confidence), rounds=tables.of_rounds(comparison))
    yield _without_note(tables.metric_table(replace(comparison, metrics=shown)), note)
    if any(side.failed for side in comparison.failures.values()):
        yield tables.failures_table(comparison.failures)
    limit = {
        name: Counter(before=each.before, after=each.after, unit=comparison.metrics[name].unit)
        for name, each in comparison.limit.items()
    }
    telling = list(findings.mechanism(comparison.mechanism).items())[:MOST_COUNTERS]
    counters = {**dict(telling), **limit}
    title = "Mechanism and limit" if comparison.sliced is None else "Mechanism and limit, in rounds"
    yield from tables.sides_table(title, counters, alone=False)


def _chosen(comparison: Comparison) -> list[str]:
    """The primary and what else has a verdict, TTFT, TPOT, throughput."""
    judged = [name for name, row in comparison.metrics.items() if row.verdict is not None]
    return [comparison.primary, *judged, *ROWS]


def _warnings(comparison: Comparison) -> list[str]:
    """None is left out that may do something to the verdict."""
    found = findings.following(comparison.warnings)
    known = [each for each in found[MOST_WARNINGS:] if each.severity == Severity.DESCRIBES]
    shown = [each.text for each in found if each not in known]
    return [*shown, *([f"and {len(known)} more: --all"] if known else [])]


def _without_note(table: Table, note: str = "") -> Table:
    return Table(table.title, table.columns, table.rows, note, table.numbers)
