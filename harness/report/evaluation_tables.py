"""The result of an evaluation for a terminal, markdown or csv."""

from __future__ import annotations

from collections.abc import Callable

from overlap_bench.harness.analysis.accuracy import APART, Agreement, Evaluation, Row
from overlap_bench.harness.analysis.warnings import texts
from overlap_bench.harness.common import formatting
from overlap_bench.harness.report import tables
from overlap_bench.harness.report.page import Page, Table, csv_of, tabulated

MOST_ROWS = 24
NUMBERS = ("items", "before", "after", "difference", "differ")
NOTE = (
    "difference = after − before, in percentage points where an item is right or wrong; interval: "
    "{confidence}% for other items of the same task (paired), while of these items the difference is exact. "
    "differ: items that are judged otherwise."
)


def conclusion(result: Evaluation) -> str:
    first = result.tasks[0] if result.tasks else None
    if first is None:
        said = f"{result.variant}: no item with a number."
        return said if result.after is None else f"{said} {agreed(result.answers)}"
    what = f"{result.variant}: {first.metric} of {first.task}"
    if result.after is None:
        return f"{what} is {_share(first.before)} over {first.items} items."
    said = f"{what} {_share(first.before)} → {_share(first.after)}, {_difference(first)}"
    said = f"{said} {_interval(first)}".rstrip()
    items = f"over {first.items} items, of which {first.differ} differ"
    return f"{said} {items}. {agreed(result.answers)}"


def agreed(answers: Agreement) -> str:
    parts = []
    if answers.loglikelihoods:
        count = f"{answers.apart} of {answers.loglikelihoods} log-likelihoods"
        verb = "ARE APART" if answers.apart else "are apart"
        largest = f"the largest difference is {answers.largest_difference:.1e}"
        parts.append(f"{count} {verb} by more than {APART:g} per token, {largest}")
    if answers.texts:
        verb = "DIFFER" if answers.texts_differ else "differ"
        parts.append(f"{answers.texts_differ} of {answers.texts} texts {verb}")
    return f"{'; '.join(parts)}." if parts else "Nothing was answered."


def accuracies(result: Evaluation) -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "task": lambda row: row.task,
        "metric": lambda row: row.metric,
        "items": lambda row: str(row.items),
        "before": lambda row: _share(row.before),
    }
    note = ""
    if result.after is not None:
        columns |= {
            "after": lambda row: _share(row.after),
            "difference": _difference,
            "interval": _interval,
            "differ": lambda row: str(row.differ),
        }
        note = NOTE.format(confidence=f"{100 * result.confidence:.4g}")
        if len(result.tasks) > MOST_ROWS:
            note += f" {len(result.tasks) - MOST_ROWS} more rows in --format json."
    return tabulated("Accuracy", result.tasks[:MOST_ROWS], columns, note, NUMBERS)


def _share(value: float | None) -> str:
    return f"{value:.2%}" if value is not None and 0 <= value <= 1 else formatting.number(value)


def _points(value: float | None, row: Row) -> str:
    if value is None:
        return "–"
    of_shares = all(each is not None and 0 <= each <= 1 for each in (row.before, row.after))
    text = f"{100 * value:+.2f}" if of_shares else f"{value:+.4g}"
    return text.replace("-", "−")


def _difference(row: Row) -> str:
    return _points(row.delta, row)


def _interval(row: Row) -> str:
    return "" if row.low is None else f"[{_points(row.low, row)}, {_points(row.high, row)}]"


def to_csv(result: Evaluation) -> str:
    return csv_of(("run", "variant"), Row, (((result.run, result.variant), row) for row in result.tasks))


def page(result: Evaluation) -> Page:
    lines = (tables.changed_settings(result.before, result.after),)
    return Page(conclusion(result), lines, (accuracies(result),), texts(result.warnings))
