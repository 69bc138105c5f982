"""A result on stdout, in the form that `--format` asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.report.formats import Found
    from harness.report.page import Table

PIPE_WIDTH = 120  # columns of a table that goes to no terminal


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


def show(found: Found, format: Format) -> None:
    """Print a result in the form that was asked for."""
    from harness.report import formats

    _print(format, lambda: formats.to_json(found), lambda: formats.to_csv(found),
           lambda: formats.to_markdown(found), partial(formats.to_terminal, found))  # fmt: skip


def show_tables(tables: Sequence[Table]) -> None:
    """Print what is for a person alone."""
    from harness.common.consoles import Console
    from harness.report.page import terminal_table

    console = Console(highlight=False)
    for table in tables:
        console.print(*terminal_table(table, console.width), sep="\n")


def _print(
    format: Format,
    to_json: Callable[[], str],
    to_csv: Callable[[], str],
    to_markdown: Callable[[], str],
    to_terminal: Callable[[int], Iterator[RenderableType]],
) -> None:
    from harness.common.consoles import Console, readable

    if format is not Format.TABLE:
        texts = {Format.JSON: to_json, Format.CSV: to_csv, Format.MARKDOWN: to_markdown}
        with readable():
            sys.stdout.write(texts[format]())
        return

    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        wide = None if "COLUMNS" in os.environ else PIPE_WIDTH
        console = Console(highlight=False, width=wide)
    for part in to_terminal(console.width):
        # A line that goes to a file stays one: `head -1` is the whole answer.
        console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)
