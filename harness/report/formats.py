"""One exporter per format, for every kind of result: --format table, markdown, json, csv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.report import sections
from overlap_bench.harness.report.page import Page, markdown_page, terminal_page

if TYPE_CHECKING:
    from rich.console import RenderableType

# By the name of a kind of result: the module that shows it, imported once there is one to show. It has
# `page(found)`, `to_csv(found)`, and where its markdown is more than its page, `to_markdown(found)`.
FORMS = {
    "Result": "tables",
    "Factorial": "factorial_tables",  # a Result that is one
    "Gated": "gate_tables",  # a Result that was judged
    "SweepResult": "sweep_tables",
    "Bisected": "bisection_tables",
    "Sensitivity": "sensitivity_tables",
    "Explained": "explain_tables",
    "ExperimentResult": "experiment_tables",
    "Evaluation": "evaluation_tables",
    "GatePlans": "gate_plan_tables",
    "Catalogue": "catalogue_tables",
    "TraceResult": "trace_tables",
    "ProfileResult": "trace_tables",
    "Brief": "trace_tables",
}
MEASURED = ("Result", "Bisected", "SweepResult", "ExperimentResult", "Evaluation", "GatePlans")


def to_json(found: msgspec.Struct) -> str:
    """The object as it is; of what was measured, with `headline` and `verdict` at its top: the sentence that
    is printed first, and the word in it, null where there is none, and where several have one each."""
    plain = to_plain(found)
    if type(found).__name__ in MEASURED:
        headline = next(_pages(found)).conclusion
        top = {"schema_version": plain["schema_version"], "headline": headline, "verdict": verdict_of(found)}
        plain = {**top, **plain}
    return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"


def verdict_of(found: msgspec.Struct) -> str | None:
    """The one word that a result has: of its gate, its only comparison or its first claim."""
    if not isinstance(found, Result):
        word: str | None = getattr(found, "verdict", None)  # a bisection and an experiment have one
        return word
    if found.gate is not None:
        return found.gate.verdict
    verdict = found.comparisons[0].verdict if len(found.comparisons) == 1 else None
    return None if verdict is None else verdict.word


def to_csv(found: msgspec.Struct) -> str:
    """One flat table, unrounded."""
    text: str = _form(found).to_csv(found)
    return text


def to_markdown(found: msgspec.Struct) -> str:
    write: Callable[[msgspec.Struct], str] | None = getattr(_form(found), "to_markdown", None)
    return write(found) if write else "\n".join(map(markdown_page, _pages(found)))


def to_terminal(found: msgspec.Struct, width: int, whole: bool = True) -> Iterator[RenderableType]:
    """Renderables for a rich console of that width; of a comparison what fits on a screen, unless `whole`."""
    for page in _pages(found, whole):
        yield from terminal_page(page, width)


def _pages(found: msgspec.Struct, whole: bool = True) -> Iterator[Page]:
    """What a person reads of it."""
    if not isinstance(found, Result) or found.factorial is not None:
        yield _form(found).page(found)
        return
    if found.gate is not None:
        from overlap_bench.harness.report import gate_tables

        yield gate_tables.page(found, whole)
    yield from sections.pages(found, whole)


def _form(found: msgspec.Struct) -> Any:
    kind = type(found).__name__
    if isinstance(found, Result) and found.factorial is not None:
        kind = "Factorial"
    elif isinstance(found, Result) and found.gate is not None:
        kind = "Gated"
    return import_module(f"{__package__}.{FORMS[kind]}")
