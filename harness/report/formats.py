"""One exporter per format, for every kind of result: --format table, markdown, json, csv."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from harness.analysis.accuracy import Evaluation
from harness.analysis.experiment_result import ExperimentResult
from harness.analysis.explain import Explained
from harness.analysis.result import Result, SweepResult, to_plain
from harness.report import (
    evaluation_tables,
    experiment_tables,
    explain_tables,
    factorial_tables,
    gate_tables,
    sweep_tables,
    tables,
    trace_tables,
)
from harness.report.page import Page, markdown_page, terminal_page
from harness.trace.result import TraceResult

if TYPE_CHECKING:
    from rich.console import RenderableType

Found = Result | SweepResult | Explained | ExperimentResult | Evaluation | TraceResult


def to_json(found: Found) -> str:
    return msgspec.json.format(msgspec.json.encode(to_plain(found))).decode() + "\n"


def to_csv(found: Found) -> str:
    """One flat table, unrounded."""
    match found:
        case SweepResult():
            return sweep_tables.to_csv(found)
        case Explained():
            return explain_tables.to_csv(found)
        case ExperimentResult():
            return experiment_tables.to_csv(found)
        case Evaluation():
            return evaluation_tables.to_csv(found)
        case TraceResult():
            return trace_tables.to_csv(found)
        case Result(factorial=factorial, gate=gate):
            if factorial is not None:
                return factorial_tables.to_csv(found)
            return tables.to_csv(found) if gate is None else gate_tables.to_csv(found)


def to_markdown(found: Found) -> str:
    if isinstance(found, Result) and found.gate is not None:
        return gate_tables.to_markdown(found)
    return "\n".join(map(markdown_page, pages(found)))


def to_terminal(found: Found, width: int) -> Iterator[RenderableType]:
    """Renderables for a rich console of that width."""
    for page in pages(found):
        yield from terminal_page(page, width)


def pages(found: Found) -> Iterator[Page]:
    """What a person reads of it."""
    match found:
        case SweepResult():
            yield sweep_tables.page(found)
        case Explained():
            yield explain_tables.page(found)
        case ExperimentResult():
            yield experiment_tables.page(found)
        case Evaluation():
            yield evaluation_tables.page(found)
        case TraceResult():
            yield trace_tables.page(found)
        case Result(factorial=factorial, gate=gate):
            if factorial is not None:
                yield factorial_tables.page(found)
            elif gate is not None:
                yield from gate_tables.pages(found)
            else:
                yield from tables.pages(found)
