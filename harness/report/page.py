"""A page of tables, as everything is printed, and how it is written: as markdown, or for a terminal. What is
printed by --format csv is one flat table of its own."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from overlap_bench.harness.common.formatting import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = TypeVar("Row")
PER_STEP = "per step"  # the change of a step's time in microseconds
NUMBERS = ("before", "after", "change", PER_STEP)  # columns to align right, unless others are named
NARROW = 90  # a terminal with fewer columns shows change, interval and verdict in one
NAMES = 20  # a column no wider than this is taken for names, and stays whole
FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.,]+%?$)")  # how one begins; -5.9% is a number
SHORT = 8  # a word of no more characters is never broken: an interval's numbers have no more


@dataclass(frozen=True, slots=True)
class Table:
    """One part of the report; `note` stands under it, and on a web page `about` above it. `numbers`: columns
    to align right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numbers: tuple[str, ...] = NUMBERS
    about: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """All that is printed of a result: its sentence, the lines under it, tables, and lists that close it."""

    conclusion: str
    lines: tuple[str, ...]
    tables: tuple[Table, ...]
    warnings: Sequence[str]
    notes: Sequence[str] = ()
    afterwards: Sequence[str] = ()

    def lists(self) -> Iterator[tuple[str, Sequence[str]]]:
        """The lists that hold something, with their titles."""
        named = {"Notes": self.notes, "Warnings": self.warnings, "Afterwards": self.afterwards}
        yield from ((title, entries) for title, entries in named.items() if entries)


def tabulated(
    title: str,
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    note: str = "",
    numbers: tuple[str, ...] = NUMBERS,
    about: str = "",
) -> Table:
    """A table with a line for each of `rows`; `columns`: by its name, what a column says of a row."""
    cells = tuple(tuple(say(row) for say in columns.values()) for row in rows)
    return Table(title, tuple(columns), cells, note, numbers, about)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A header and a line for each row; numbers unrounded, None empty. Text that a spreadsheet would take for
    a formula begins with an apostrophe there."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_no_formula(cell) for cell in row] for row in rows)
    return text.getvalue()


def csv_of(columns: Sequence[str], kind: type[Struct], rows: Iterable[tuple[Sequence[Any], Struct]]) -> str:
    """The same of structs of one kind: in front of the fields of each stands what `columns` say of it."""
    header = (*columns, *kind.__struct_encode_fields__)
    return csv_text(header, ((*about, *astuple(row)) for about, row in rows))


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def rendered(template: str, **given: Any) -> str:
    """A web page that needs nothing else."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("overlap_bench.harness.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**given)


def markdown_page(page: Page) -> str:
    bold = page.conclusion.replace("\n", "**\n\n**")
    lines = [f"**{bold}**", "", *(f"{line}\n" for line in page.lines)]
    for table in page.tables:
        lines += markdown_table(table)
    for title, entries in page.lists():
        lines += [f"### {title}", "", *(f"- {line}" for line in entries), ""]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(table: Table) -> list[str]:
    """Its lines, the title and an empty last one included; of one without rows the title and the note."""
    if not table.rows:
        return [f"### {table.title}", "", table.note, ""]
    rulers = tuple("---:" if name in table.numbers else "---" for name in table.columns)
    rows = (
        [" ".join(cell.replace("|", "\\|").splitlines()) for cell in row]
        for row in (table.columns, rulers, *table.rows)
    )
    note = [table.note, ""] if table.note else []
    return [f"### {table.title}", "", *(f"| {' | '.join(row)} |" for row in rows), "", *note]


def terminal_page(page: Page, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(page.conclusion, style="bold")
    yield from (Text(line) for line in page.lines)
    for table in page.tables:
        yield from terminal_table(table, width)
    for title, entries in page.lists():
        yield Text(title, style="bold")
        yield from (Text(f"• {line}") for line in entries)


def terminal_table(table: Table, width: int) -> Iterator[RenderableType]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        yield Text(table.title, style="bold")
        yield Text(table.note + "\n", style="dim")
        return
    rows = tuple(tuple(map(visible, row)) for row in table.rows)  # as wide as they will be seen
    table = replace(table, rows=rows)
    shown, widths = fitted(narrowed(table) if width < NARROW else table, width)
    rich_table = RichTable(
        title=shown.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, title_style="bold"
    )
    for name, room in zip(shown.columns, widths, strict=True):
        right = name in shown.numbers
        header = _packed(name, room)
        rich_table.add_column(header, justify="right" if right else "left", overflow="fold", width=room)
    for name, *cells in shown.rows:
        rich_table.add_row(Text(_packed(name, widths[0])), *map(Text, cells))
    yield rich_table
    if shown.note:
        yield Text(shown.note + "\n", style="dim")


def _pieces(name: str) -> list[str]:
    """A name where it may be broken: behind spaces, and host_wait_ms behind each underscore."""
    return re.findall(r"[^ _]*[ _]|[^ _]+", name)


def _packed(name: str, width: int | None) -> str:
    """A name in lines of that width, as far as it may be broken."""
    if width is None or _longest_line(name) <= width:
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
    if PER_STEP in table.columns:  # behind the change that it is another form of
        at = table.columns.index(PER_STEP)
        columns = (*table.columns[:at], *table.columns[at + 1 :])
        rows = tuple(
            (*row[: at - 1], row[at - 1] + f" ({row[at]})" * bool(row[at]), *row[at + 1 :])
            for row in table.rows
        )
        return narrowed(replace(table, columns=columns, rows=rows))
    header = "\n".join(table.columns[change:])
    named = {"floor": "floor "}  # under each other, a bare ±1.2% would be taken for the interval's
    joined = [named.get(column, "") for column in table.columns[change:]]
    rows = tuple(
        (
            *row[:change],
            "\n".join(name + cell for name, cell in zip(joined, row[change:], strict=True) if cell),
        )
        for row in table.rows
    )
    columns = (*table.columns[:change], header)
    return replace(table, columns=columns, rows=rows, numbers=(*table.numbers, header))


def stacked(table: Table, many: int) -> Table:
    """The table with every `many` columns after the first stacked into one."""
    groups = [slice(1), *(slice(at, at + many) for at in range(1, len(table.columns), many))]

    def joined(cells: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("\n".join(cells[group]) for group in groups)

    numbers = [group for group in groups if set(table.columns[group]) & set(table.numbers)]
    return replace(
        table,
        columns=joined(table.columns),
        rows=tuple(map(joined, table.rows)),
        numbers=tuple("\n".join(table.columns[group]) for group in numbers),
    )


def fitted(table: Table, width: int) -> tuple[Table, Sequence[int | None]]:
    """The table as it fits into `width` columns of a terminal, and the room for each of its columns: stacked
    where its numbers would be broken otherwise. Where nothing helps, rich breaks what it will."""
    plain = room_for(table.columns, table.rows, width, table.numbers)
    if plain is not None:
        return table, plain
    for many in range(2, len(table.columns)):  # here no word is broken at all
        found = stacked(table, many)
        room = room_for(found.columns, found.rows, width, found.columns[:1], found.columns[1:])
        if room is not None:
            return found, room
    return table, [None] * len(table.columns)


def room_for(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    numbers: Sequence[str] = (),
    lines: Sequence[str] = (),
) -> Sequence[int | None] | None:
    """Room for each column; a None among them: as much as it takes. Where that is wider than `width`: room
    for its longest word, and the rest shared out by what each lacks; the first column, of names, stays whole
    as long as it can. Where that is still too wide, long words are broken, to the same length in each column,
    but not in those of `numbers`, and in the first one last. Those of `lines` are not even broken between
    words. None in place of all where nothing fits."""
    columns = [(name, [row[place] for row in rows]) for place, name in enumerate(names)]
    whole = [max(map(_longest_line, (name, *cells))) for name, cells in columns]
    free = width - 3 * (len(columns) - 1) - 2  # the rest is padding and border, as in SIMPLE_HEAD
    if sum(whole) <= free:
        return [None] * len(columns)
    words = [
        most if name in lines else max(map(_longest_word, (*_pieces(name), *cells)), default=0)
        for most, (name, cells) in zip(whole, columns, strict=True)
    ]
    kept = {*numbers, *lines}
    parts = [word if name in kept else min(word, SHORT) for word, name in zip(words, names, strict=True)]
    named = [most if most <= NAMES else word for most, word in zip(whole, words, strict=True)]
    for least in ([named[0], *words[1:]], words, [named[0], *parts[1:]], parts):
        for most in range(max(named), 0, -1):
            room = [max(low, min(high, most)) for low, high in zip(least, named, strict=True)]
            if sum(room) <= free:
                lacks = [high - each for high, each in zip(whole, room, strict=True)]
                left = free - sum(room)
                return [each + left * lack // sum(lacks) for each, lack in zip(room, lacks, strict=True)]
    return None


def _longest_line(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _longest_word(cell: str) -> int:
    """An interval is one, though there is a space in it."""
    return max(map(len, re.findall(r"\[[^]]*\]|\S+", cell)), default=0)
