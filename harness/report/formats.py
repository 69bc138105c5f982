"""One exporter per format, for every kind of result: --format table, markdown, json, csv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import msgspec

from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.report import sections
from overlap_bench.harness.report.page import Page, markdown_page, terminal_page

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlap_bench.harness.analysis.accuracy import Evaluation
    from overlap_bench.harness.analysis.bisection import Bisected
    from overlap_bench.harness.analysis.catalogue import Catalogue
    from overlap_bench.harness.analysis.experiment_result import ExperimentResult
    from overlap_bench.harness.analysis.explain import Explained
    from overlap_bench.harness.analysis.gate_plans import GatePlans
    from overlap_bench.harness.analysis.result import SweepResult
    from overlap_bench.harness.analysis.sensitivity import Sensitivity
    from overlap_bench.harness.trace.result import Brief, TraceResult

Found: TypeAlias = (
    "Result | SweepResult | Bisected | Sensitivity | Explained | ExperimentResult | Evaluation | GatePlans | "
    "Catalogue | TraceResult | Brief"
)
# By the name of a kind of result: the module that shows it, imported once there is one to show.
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


class Form(Protocol):
    """What a module of FORMS has; also `to_markdown`, where that is more than its page."""

    def page(self, found: Any) -> Page: ...
    def to_csv(self, found: Any) -> str: ...


def to_json(found: Found) -> str:
    """The object as it is; of what was measured, with `headline` and `verdict` at its top: the sentence that
    is printed first, and the word in it, null where there is none, and where several have one each."""
    plain = to_plain(found)
    if type(found).__name__ in MEASURED:
        headline = next(_pages(found)).conclusion
        top = {"schema_version": plain["schema_version"], "headline": headline, "verdict": verdict_of(found)}
        plain = {**top, **plain}
    return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"


def verdict_of(found: Found) -> str | None:
    """The one word that a result has: of its gate, its only comparison or its first claim."""
    if not isinstance(found, Result):
        word: str | None = getattr(found, "verdict", None)  # a bisection and an experiment have one
        return word
    if found.gate is not None:
        return found.gate.verdict
    verdict = found.comparisons[0].verdict if len(found.comparisons) == 1 else None
    return None if verdict is None else verdict.word


def to_csv(found: Found) -> str:
    """One flat table, unrounded."""
    return _form(found).to_csv(found)


def to_markdown(found: Found) -> str:
    write: Callable[[Found], str] | None = getattr(_form(found), "to_markdown", None)
    return write(found) if write else "\n".join(map(markdown_page, _pages(found)))


def to_terminal(found: Found, width: int, whole: bool = True) -> Iterator[RenderableType]:
    """Renderables for a rich console of that width; of a comparison what fits on a screen, unless `whole`."""
    for page in _pages(found, whole):
        yield from terminal_page(page, width)


def _pages(found: Found, whole: bool = True) -> Iterator[Page]:
    """What a person reads of it."""
    if not isinstance(found, Result) or found.factorial is not None:
        yield _form(found).page(found)
        return
    if found.gate is not None:
        from overlap_bench.harness.report import gate_tables

        yield gate_tables.page(found, whole)
    yield from sections.pages(found, whole)


def _form(found: Found) -> Form:
    kind = type(found).__name__
    if isinstance(found, Result) and found.factorial is not None:
        kind = "Factorial"
    elif isinstance(found, Result) and found.gate is not None:
        kind = "Gated"
    return cast(Form, import_module(f"{__package__}.{FORMS[kind]}"))
