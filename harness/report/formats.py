"""One exporter per format, for every kind of result: --format table, markdown, json, csv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import msgspec

from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.report import brief, tables
from overlap_bench.harness.report.page import Page, markdown_page, terminal_page

if TYPE_CHECKING:
    from rich.console import RenderableType

Found = Any  # a Result, or another kind of FORMS
Form = tuple[Callable[[Any], Page | Iterable[Page]], Callable[[Any], str]]
# By the name of a kind of result: what makes its page and its CSV, imported once there is one to print.
FORMS = {
    "SweepResult": ("sweep_tables", "page", "to_csv"),
    "Bisected": ("bisection_tables", "page", "to_csv"),
    "Sensitivity": ("sensitivity_tables", "page", "to_csv"),
    "Explained": ("explain_tables", "page", "to_csv"),
    "ExperimentResult": ("experiment_tables", "page", "to_csv"),
    "Evaluation": ("evaluation_tables", "page", "to_csv"),
    "GatePlans": ("gate_plan_tables", "page", "to_csv"),
    "Catalogue": ("catalogue_tables", "page", "to_csv"),
    "TraceResult": ("trace_tables", "page", "to_csv"),
    "ProfileResult": ("trace_tables", "page", "to_csv"),
    "Brief": ("trace_tables", "brief_page", "brief_to_csv"),
    "Factorial": ("factorial_tables", "page", "to_csv"),
    "Gated": ("gate_tables", "pages", "to_csv"),
}
MEASURED = ("Result", "Bisected", "SweepResult", "ExperimentResult", "Evaluation", "GatePlans")
DECIDED = ("Bisected", "ExperimentResult")  # which have a verdict of their own


def to_json(found: Found) -> str:
    """The object as it is; of what was measured, with `headline` and `verdict` at its top: the sentence that
    is printed first, and the word in it, null where there is none, or one for each of several."""
    plain = to_plain(found)
    if type(found).__name__ in MEASURED:
        headline = next(iter(_pages(found))).conclusion
        top = {"schema_version": plain["schema_version"], "headline": headline, "verdict": verdict_of(found)}
        plain = {**top, **plain}
    return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"


def verdict_of(found: Found) -> str | None:
    """The one word that a result has: of its gate, its only comparison or its first claim."""
    if type(found).__name__ in DECIDED:
        return cast("str | None", found.verdict)
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
    kind = _kind(found)
    if kind in ("Gated", "Catalogue"):
        written: str = _module(kind).to_markdown(found)
        return written
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
    kind = _kind(found)
    if kind == "Result":
        return tables.pages, tables.to_csv
    _, page, csv = FORMS[kind]
    return getattr(_module(kind), page), getattr(_module(kind), csv)


def _kind(found: Found) -> str:
    if isinstance(found, Result) and found.factorial is not None:
        return "Factorial"
    return "Gated" if isinstance(found, Result) and found.gate is not None else type(found).__name__


def _module(kind: str) -> Any:
    return import_module(f"{__package__}.{FORMS[kind][0]}")
