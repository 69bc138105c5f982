"""One exporter per format, for every kind of result: --format table, markdown, json, csv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from overlap_bench.harness.analysis.accuracy import Evaluation
from overlap_bench.harness.analysis.bisection import Bisected
from overlap_bench.harness.analysis.catalogue import Catalogue
from overlap_bench.harness.analysis.experiment_result import ExperimentResult
from overlap_bench.harness.analysis.explain import Explained
from overlap_bench.harness.analysis.gate_plans import GatePlans
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Result, SweepResult
from overlap_bench.harness.analysis.sensitivity import Sensitivity
from overlap_bench.harness.report import (
    bisection_tables,
    brief,
    catalogue_tables,
    evaluation_tables,
    experiment_tables,
    explain_tables,
    factorial_tables,
    gate_plan_tables,
    gate_tables,
    sensitivity_tables,
    sweep_tables,
    tables,
    trace_tables,
)
from overlap_bench.harness.report.page import Page, markdown_page, terminal_page
from overlap_bench.harness.trace.result import Brief, ProfileResult, TraceResult

if TYPE_CHECKING:
    from rich.console import RenderableType

Form = tuple[Callable[[Any], Page | Iterable[Page]], Callable[[Any], str]]
FORMS: dict[type, Form] = {
    SweepResult: (sweep_tables.page, sweep_tables.to_csv),
    Bisected: (bisection_tables.page, bisection_tables.to_csv),
    Sensitivity: (sensitivity_tables.page, sensitivity_tables.to_csv),
    Explained: (explain_tables.page, explain_tables.to_csv),
    ExperimentResult: (experiment_tables.page, experiment_tables.to_csv),
    Evaluation: (evaluation_tables.page, evaluation_tables.to_csv),
    GatePlans: (gate_plan_tables.page, gate_plan_tables.to_csv),
    Catalogue: (catalogue_tables.page, catalogue_tables.to_csv),
    TraceResult: (trace_tables.page, trace_tables.to_csv),
    ProfileResult: (trace_tables.page, trace_tables.to_csv),
    Brief: (trace_tables.brief_page, lambda brief: trace_tables.to_csv(brief.whole)),
}
MEASURED = (Result, Bisected, SweepResult, ExperimentResult, Evaluation, GatePlans)
Found = (
    Result
    | Bisected
    | SweepResult
    | Explained
    | Sensitivity
    | ExperimentResult
    | Evaluation
    | GatePlans
    | Catalogue
    | TraceResult
    | Brief
)


def to_json(found: Found) -> str:
    """The object as it is; of what was measured, with `headline` and `verdict` at its top: the sentence that
    is printed first, and the word in it, null where there is none, or one for each of several."""
    plain = to_plain(found)
    if isinstance(found, MEASURED):
        headline = next(iter(_pages(found))).conclusion
        top = {"schema_version": plain["schema_version"], "headline": headline, "verdict": verdict_of(found)}
        plain = {**top, **plain}
    return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"


def verdict_of(found: Found) -> str | None:
    """The one word that a result has: of its gate, its only comparison or its first claim."""
    if isinstance(found, Bisected | ExperimentResult):
        return found.verdict
    if not isinstance(found, Result):
        return None
    if found.gate is not None:
        return found.gate.verdict
    verdict = found.comparisons[0].verdict if len(found.comparisons) == 1 else None
    return None if verdict is None else verdict.word


def to_csv(found: Found) -> str:
    """One flat table, unrounded."""
    return _form(found)[1](found)


def to_markdown(found: Found) -> str:
    if isinstance(found, Result) and found.gate is not None:
        return gate_tables.to_markdown(found)
    if isinstance(found, Catalogue):
        return catalogue_tables.to_markdown(found)
    return "\n".join(map(markdown_page, _pages(found)))


def to_terminal(found: Found, width: int, whole: bool = True) -> Iterator[RenderableType]:
    """Renderables for a rich console of that width; of a comparison what fits on a screen, unless `whole`."""
    comparison = isinstance(found, Result) and found.factorial is None
    for page in brief.pages(cast(Result, found)) if comparison and not whole else _pages(found):
        yield from terminal_page(page, width)


def _pages(found: Found) -> Iterable[Page]:
    """What a person reads of it."""
    pages = _form(found)[0](found)
    return [pages] if isinstance(pages, Page) else pages


def _form(found: Found) -> Form:
    if not isinstance(found, Result):
        return FORMS[type(found)]
    if found.factorial is not None:
        return factorial_tables.page, factorial_tables.to_csv
    return (tables.pages, tables.to_csv) if found.gate is None else (gate_tables.pages, gate_tables.to_csv)
