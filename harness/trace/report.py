"""What `bench trace` prints of one trace, or of two as before and after.

`result` makes the object of `--format json`; everything else is made of that object and nothing else:

    {"schema_version", "before": {"file", "format", "span_ms", "devices", "rows": {table: count}}, "after": as
    before or null, "parts": {name: {"title", "keys", "ranked_by", "note", "rows": [{"key": [...], "values":
    {measure: {"unit", "before", "after", "change"}}}]}}, "warnings": [...]}

`change` is after/before − 1, a fraction; null where there is one trace, or nothing before. A row that one of
two traces lacks is 0 there in counts and in totals, and null in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.pages import Page, Table, csv_text
from harness.spelling import number, percent
from harness.trace.analysis import Part
from harness.trace.events import Trace

SCHEMA_VERSION = 1
SHOWN = 15  # rows of a ranked table; all of them are in json and csv
NAME_WIDTH = 70  # of a name in a table, longer ones lose their middle
LENGTH_MARGIN = 0.02  # by which two traces may differ in length before totals mislead
ADDITIVE = ("count", "total_ms", "MiB")  # 0 where there is none
SHARES = ("share", "busy")
TRACED = "these are times of a traced run: they show where time goes, not how much of it there is untraced"
TWO_TRACES = (
    "one trace on each side: a change here has no interval and no verdict, and differs from trace to trace; "
    "bench run decides"
)

Analysed = tuple[Trace, Sequence[Part]]


# ---------------------------------------------------------------------------------------------------------
# The object


def result(before: Analysed, after: Analysed | None) -> dict[str, Any]:
    others = {part.name: part for part in after[1]} if after else {}
    warnings = list(before[0].warnings)
    if after is not None:
        warnings = [f"before: {line}" for line in warnings] + [f"after: {line}" for line in after[0].warnings]
        warnings += [TWO_TRACES, *_other_length(before[0], after[0])]
    return {
        "schema_version": SCHEMA_VERSION,
        "before": _source(before[0]),
        "after": None if after is None else _source(after[0]),
        "parts": {part.name: _part(part, others.get(part.name)) for part in before[1]},
        "warnings": [*warnings, TRACED],
    }


def _other_length(before: Trace, after: Trace) -> Iterator[str]:
    """Counts and totals of traces that are not equally long say little."""
    spans = [last - first for first, last in (before.span(), after.span())]
    if max(spans) > min(spans) * (1 + LENGTH_MARGIN):
        lengths = " and ".join(f"{number(span / 1e6)} ms" for span in spans)
        yield f"the traces are of different length, {lengths}: compare shares and percentiles, not totals"


def _source(trace: Trace) -> dict[str, Any]:
    first, last = trace.span()
    return {
        "file": trace.file,
        "format": trace.format,
        "span_ms": (last - first) / 1e6,
        "devices": len(trace.devices),
        "rows": trace.rows(),
    }


def _part(before: Part, after: Part | None) -> dict[str, Any]:
    sides = [{row.key: row.values for row in part.rows} for part in (before, after) if part is not None]
    rows: list[dict[str, Any]] = [
        {"key": list(key), "values": _values(before.measures, [side.get(key) for side in sides])}
        for key in dict.fromkeys(key for side in sides for key in side)
    ]
    if before.ranked_by:
        rows.sort(key=lambda row: _largest(row, before.ranked_by), reverse=True)
    return {
        "title": before.title,
        "keys": list(before.keys),
        "ranked_by": before.ranked_by or None,
        "note": before.note,
        "rows": rows,
    }


def _values(
    measures: Sequence[tuple[str, str]], sides: Sequence[tuple[float | None, ...] | None]
) -> dict[str, Any]:
    found = {}
    for place, (name, unit) in enumerate(measures):
        missing = 0 if name in ADDITIVE else None
        cells = [missing if side is None else side[place] for side in sides]
        before, after = (cells[0], cells[1]) if len(cells) > 1 else (cells[0], None)
        change = None if not before or after is None else after / before - 1
        found[name] = {"unit": unit, "before": before, "after": after, "change": change}
    return found


def _largest(row: Mapping[str, Any], measure: str) -> float:
    value = row["values"][measure]
    return max(value["before"] or 0.0, value["after"] or 0.0)


# ---------------------------------------------------------------------------------------------------------
# To read


def headline(result: Mapping[str, Any]) -> str:
    """What was read, a line for each file."""
    sides = {name: result[name] for name in ("before", "after") if result[name] is not None}
    return "\n".join(
        (f"{name}: " if len(sides) > 1 else "") + _described(source) for name, source in sides.items()
    )


def _described(source: Mapping[str, Any]) -> str:
    rows = ", ".join(f"{count:,} {name}" for name, count in source["rows"].items())
    devices = f"{source['devices']} device{'s' if source['devices'] != 1 else ''}"
    span = f"{number(source['span_ms'])} ms"
    return f"{source['file']} ({source['format']}): {span} of {devices}; {rows}"


def parts(result: Mapping[str, Any]) -> Iterator[Table]:
    """Tables, the longest rows first and the rest left out; a part without rows says so."""
    compared = result["after"] is not None
    for part in result["parts"].values():
        rows = part["rows"]
        left_out = len(rows) - SHOWN if part["ranked_by"] and len(rows) > SHOWN else 0
        shown = rows[:SHOWN] if left_out else rows
        more = f" {left_out:,} more in json and csv." if left_out else ""
        note = part["note"] + more if rows else "None in the trace."
        yield _compared(part, shown, note) if compared else _alone(part, shown, note)


def _alone(part: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], note: str) -> Table:
    measures = tuple(rows[0]["values"]) if rows else ()
    cells = (
        (*map(shortened, row["key"]), *(_cell(name, row["values"][name]["before"]) for name in measures))
        for row in rows
    )
    return Table(part["title"], (*part["keys"], *measures), tuple(cells), note, numbers=measures)


def _compared(part: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], note: str) -> Table:
    """A line for each measure of each row; the key stands in the first of them."""
    cells = []
    for row in rows:
        for place, (name, value) in enumerate(row["values"].items()):
            key = map(shortened, row["key"]) if place == 0 else ("" for _ in row["key"])
            before, after = (_cell(name, value[side]) for side in ("before", "after"))
            cells.append((*key, name, before, after, _change(name, value)))
    columns = (*part["keys"], "", "before", "after", "change") if rows else ()
    return Table(part["title"], columns, tuple(cells), note)


def _change(measure: str, value: Mapping[str, float | None]) -> str:
    """Of what is shown in percent, in points: its change in percent would be mistaken for these."""
    before, after = value["before"], value["after"]
    if measure not in SHARES or before is None or after is None:
        return percent(value["change"])
    return f"{100 * (after - before):+.1f} points".replace("-", "−")


def _cell(measure: str, value: float | None) -> str:
    if value is not None and measure in SHARES:
        return f"{value:.1%}"
    if value is not None and measure == "count":
        return f"{value:,.0f}"
    return number(value)


def shortened(name: str) -> str:
    """A name that fits: its beginning and its end."""
    if len(name) <= NAME_WIDTH:
        return name
    half = (NAME_WIDTH - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def page(result: Mapping[str, Any]) -> Page:
    return Page(headline(result), (), tuple(parts(result)), result["warnings"])


def to_csv(result: Mapping[str, Any]) -> str:
    """One line per value, every one of them, unrounded."""
    columns = ("unit", "before", "after", "change")
    lines = [
        (name, " / ".join(row["key"]), measure, *(value[column] for column in columns))
        for name, part in result["parts"].items()
        for row in part["rows"]
        for measure, value in row["values"].items()
    ]
    return csv_text(("part", "key", "measure", *columns), lines)
