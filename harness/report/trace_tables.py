"""What `bench trace` prints of one trace, or of two as before and after. Input is a `TraceResult`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap_bench.harness.common.formatting import number, percent
from overlap_bench.harness.report.page import Page, Table, csv_of
from overlap_bench.harness.report.trace_summary import gap_table, shortened, summary
from overlap_bench.harness.trace.result import Brief, PartResult, RowResult, Source, TraceResult, Value

SHOWN = 15  # rows of a ranked table; all of them are in json and csv
SHARES = ("share", "busy")


def headline(result: TraceResult) -> str:
    """What was read, a line for each file."""
    if result.after is None:
        return _described(result.before)
    return f"before: {_described(result.before)}\nafter: {_described(result.after)}"


def _described(source: Source) -> str:
    rows = ", ".join(f"{count:,} {name}" for name, count in source.rows.items())
    devices = f"{source.devices} device{'s' if source.devices != 1 else ''}"
    return f"{source.file} ({source.format}): {number(source.span_ms)} ms of {devices}; {rows}"


def parts(result: TraceResult) -> Iterator[Table]:
    """Tables, the longest rows first and the rest left out; a part without rows says so."""
    two = result.after is not None
    for part in result.parts.values():
        rows = part.rows
        left_out = len(rows) - SHOWN if part.ranked_by and len(rows) > SHOWN else 0
        shown = rows[:SHOWN] if left_out else rows
        more = f" {left_out:,} more in json and csv." if left_out else ""
        note = part.note + more if rows else "None in the trace."
        yield _two(part, shown, note, result.compared) if two else _alone(part, shown, note)


def _alone(part: PartResult, rows: Sequence[RowResult], note: str) -> Table:
    measures = tuple(rows[0].values) if rows else ()
    cells = (
        (*map(shortened, row.key), *(_cell(name, row.values[name].before) for name in measures))
        for row in rows
    )
    return Table(part.title, (*part.keys, *measures), tuple(cells), note, numbers=measures)


def _two(part: PartResult, rows: Sequence[RowResult], note: str, compared: bool) -> Table:
    """A line for each measure of each row; the key stands in the first of them."""
    cells = []
    for row in rows:
        for place, (name, value) in enumerate(row.values.items()):
            key = map(shortened, row.key) if place == 0 else ("" for _ in row.key)
            before, after = (_cell(name, each) for each in (value.before, value.after))
            change = (_change(name, value),) if compared else ()
            cells.append((*key, name, before, after, *change))
    columns = (*part.keys, "", "before", "after", *(("change",) if compared else ())) if rows else ()
    return Table(part.title, columns, tuple(cells), note)


def _change(measure: str, value: Value) -> str:
    """The change in points of what is shown in percent: its change in percent would be mistaken for these."""
    before, after = value.before, value.after
    if measure not in SHARES or before is None or after is None:
        return percent(value.change)
    return f"{100 * (after - before):+.1f} points".replace("-", "−")


def _cell(measure: str, value: float | None) -> str:
    if value is None or measure not in (*SHARES, "count"):
        return number(value)
    return f"{value:,.0f}" if measure == "count" else f"{value:.1%}"


def page(found: TraceResult | Brief) -> Page:
    """A summary, and all tables behind it, unless that is enough."""
    if isinstance(found, Brief):
        return Page(headline(found.whole), (), (summary(found.whole),), found.whole.warnings)
    return Page(headline(found), (), (summary(found), *parts(found), gap_table(found)), found.warnings)


def to_csv(result: TraceResult) -> str:
    """One line per value, every one of them, unrounded."""
    rows = (
        ((name, " / ".join(row.key), measure), value)
        for name, part in result.parts.items()
        for row in part.rows
        for measure, value in row.values.items()
    )
    return csv_of(("part", "key", "measure"), Value, rows)
