"""A result on stdout, in the form that `--format` asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.pages import Page, Table

PIPE_WIDTH = 120  # columns of a table that goes to no terminal


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


def show(result: Mapping[str, Any], format: Format) -> None:
    """Print what was measured, and what a gate said of it."""
    from harness import factorial_tables, gate_tables, tables

    if "factorial" in result:
        show_page(result, format, factorial_tables.to_csv, factorial_tables.page)
    elif "gate" in result:
        _print(result, format, gate_tables.to_csv, gate_tables.to_markdown, gate_tables.to_terminal)
    else:
        _print(result, format, tables.to_csv, tables.to_markdown, tables.to_terminal)


def show_page(
    result: Mapping[str, Any],
    format: Format,
    to_csv: Callable[[Mapping[str, Any]], str],
    page: Callable[[Mapping[str, Any]], Page],
) -> None:
    """Print an object that is one page."""
    from harness.pages import markdown_page, terminal_page

    _print(
        result,
        format,
        to_csv,
        lambda result: markdown_page(page(result)),
        lambda result, width: terminal_page(page(result), width),
    )


def show_tables(tables: Sequence[Table]) -> None:
    """Print what is for a person alone."""
    from harness.consoles import Console
    from harness.pages import terminal_table

    console = Console(highlight=False)
    for table in tables:
        console.print(*terminal_table(table, console.width), sep="\n")


def _print(
    result: Mapping[str, Any],
    format: Format,
    to_csv: Callable[[Mapping[str, Any]], str],
    to_markdown: Callable[[Mapping[str, Any]], str],
    to_terminal: Callable[[Mapping[str, Any], int], Iterator[RenderableType]],
) -> None:
    """Print an object in the form that was asked for."""
    from harness.consoles import Console, readable

    match format:
        case Format.JSON:
            import msgspec

            with readable():
                sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
        case Format.CSV:
            with readable():
                sys.stdout.write(to_csv(result))
        case Format.MARKDOWN:
            with readable():
                sys.stdout.write(to_markdown(result))
        case Format.TABLE:
            from rich.text import Text

            console = Console(highlight=False)
            if not console.is_terminal:
                wide = None if "COLUMNS" in os.environ else PIPE_WIDTH
                console = Console(highlight=False, width=wide)
            for part in to_terminal(result, console.width):
                # A line that goes to a file stays one: `head -1` is the whole answer.
                console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)
