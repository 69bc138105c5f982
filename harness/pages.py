"""A page of tables, as everything is printed, and how it is written: as markdown, or for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

NARROW = 90  # columns of a terminal under which change, interval and verdict share one
NAMES = 20  # columns no wider are of names, and stay whole


@dataclass(frozen=True, slots=True)
class Table:
    """One part of the report; `note` stands under it. `numbers`: columns to align right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numbers: tuple[str, ...] = ("before", "after", "change")


@dataclass(frozen=True, slots=True)
class Page:
    """All that is printed of a result: its sentence, the lines under it, tables, warnings."""

    conclusion: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    warnings: Sequence[str]


# ---------------------------------------------------------------------------------------------------------
# Markdown


def markdown_page(page: Page) -> str:
    bold = page.conclusion.replace("\n", "**\n\n**")
    lines = [f"**{bold}**", "", *(f"{line}\n" for line in page.lines)]
    for table in page.tables:
        lines += markdown_table(table)
    if page.warnings:
        lines += ["### Warnings", "", *(f"- {line}" for line in page.warnings)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    """Its lines, the title and an empty last one included; of one without rows the title and the note."""
    if not table.rows:
        return [f"### {table.title}", "", table.note, ""]
    rulers = ("---:" if name in table.numbers else "---" for name in table.columns)
    rows = [table.columns, tuple(rulers), *table.rows]
    note = [table.note, ""] if table.note else []
    return [f"### {table.title}", "", *map(_markdown_row, rows), "", *note]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---------------------------------------------------------------------------------------------------------
# A terminal


def terminal_page(page: Page, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(page.conclusion, style="bold")
    yield from (Text(line) for line in page.lines)
    for table in page.tables:
        yield from terminal_table(table, width)
    if page.warnings:
        yield Text("Warnings", style="bold")
        yield from (Text(f"• {line}") for line in page.warnings)


def terminal_table(table: Table, width: int) -> Iterator[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        yield Text(table.title, style="bold")
        yield Text(table.note + "\n", style="dim")
        return
    shown = narrowed(table) if width < NARROW else table
    rich_table = RichTable(
        title=shown.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, title_style="bold"
    )
    for name in shown.columns:
        right = name in shown.numbers
        rich_table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in shown.rows:
        rich_table.add_row(*(Text(cell) for cell in row))
    keep_words(rich_table, [tuple(" ".join(_pieces(name)) for name in shown.columns), *shown.rows], width)
    for column, name in zip(rich_table.columns, shown.columns, strict=True):
        column.header = _packed(name, column.width)
    yield rich_table
    if shown.note:
        yield Text(shown.note + "\n", style="dim")


def _pieces(name: str) -> list[str]:
    """A column's name where it may be broken: behind spaces, and host_wait_ms behind each underscore."""
    return re.findall(r"[^ _]*[ _]|[^ _]+", name)


def _packed(name: str, width: int | None) -> str:
    """A column's name in lines of that width, as far as it may be broken."""
    if width is None or len(name) <= width:
        return name
    lines = [""]
    for piece in _pieces(name):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def narrowed(table: Table) -> Table:
    """The metric table with change, interval and verdict below each other in one column."""
    if table.columns[-1] != "verdict":
        return table
    change = table.columns.index("interval") - 1
    named = {"floor": "floor "}  # under each other, a bare ±1.2% would be taken for the interval's
    joined = [named.get(column, "") for column in table.columns[change:]]
    rows = tuple(
        (
            *row[:change],
            "\n".join(name + cell for name, cell in zip(joined, row[change:], strict=True) if cell),
        )
        for row in table.rows
    )
    return Table(table.title, table.columns[: change + 1], rows, table.note, table.numbers)


def keep_words(table: RichTable, rows: Sequence[Sequence[str]], width: int) -> None:
    """Where a rich table of these rows is wider than `width`: give each column room for its longest word, the
    first one always, and share out the rest by what each lacks. Where that is too wide too, words longer than
    some length are broken, the same one in each column but the first."""
    columns = list(zip(*rows, strict=True))
    whole = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    room = width - 3 * (len(columns) - 1) - 2  # the rest is padding and border, as in SIMPLE_HEAD
    if sum(whole) <= room:
        return
    first, *others = (
        most if most <= NAMES else max(map(_longest_word, cells))
        for most, cells in zip(whole, columns, strict=True)
    )
    found = [[first, *(min(each, most) for each in others)] for most in range(1, max(others, default=0) + 1)]
    fits = [each for each in found if sum(each) <= room]
    if not fits:
        return
    least = fits[-1]
    lacks = [most - each for most, each in zip(whole, least, strict=True)]
    for column, each, lack in zip(table.columns, least, lacks, strict=True):
        column.width = each + (room - sum(least)) * lack // sum(lacks)


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)
