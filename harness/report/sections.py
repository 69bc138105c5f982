"""The sections of a report of a comparison. The first screen, the whole in a terminal, markdown and the web
page show them in this order: the lines under the verdict, the tables below.

To add one: a function that says it of a comparison, in a file of its own, and a line in SECTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overlap_bench.harness.analysis.result import Comparison, Result
from overlap_bench.harness.analysis.words import conclusion
from overlap_bench.harness.report import brief, findings, tables
from overlap_bench.harness.report.page import Page, Table

Say = Callable[[Comparison], str | Table | None]  # None: there is nothing to say


@dataclass(frozen=True, slots=True)
class Section:
    """A line or a table: `whole` of a full report, `brief` of the first screen; None where it isn't shown."""

    whole: Say | None = None
    brief: Say | None = None


SECTIONS = (
    Section(brief=brief.claimed),
    Section(tables.changed_code, tables.changed_code),
    Section(tables.overlaid, tables.overlaid),
    Section(tables.in_turns, tables.in_turns),
    Section(tables.step_parts, tables.step_parts),
    Section(tables.planted, tables.planted),
    Section(tables.detectable, tables.detectable),
    Section(tables.scatter),
    Section(tables.outputs_line, tables.outputs_line),
    Section(tables.metric_table, brief.metric_table),
    Section(tables.failures_table, tables.failures_table),
    Section(tables.nodes_table),
    Section(tables.mechanism_table, brief.mechanism_table),
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
