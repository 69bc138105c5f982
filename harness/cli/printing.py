"""A result on stdout, in the form that `--format` asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

import typer

from overlap_bench.harness.cli.exit_codes import OUTPUTS_DIFFER, json_for
from overlap_bench.harness.common.formatting import visible, visible_json

if TYPE_CHECKING:
    from overlap_bench.harness.report.formats import Found
    from overlap_bench.harness.report.page import Table

PIPE_WIDTH = 120  # columns of a table that goes to no terminal


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


def end_with(found: Found, format: Format, outputs_differ: bool, whole: bool = True) -> NoReturn:
    """Print a result, and end the command with the exit code that it stands for."""
    show(found, format, whole)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)


def show(found: Found, format: Format, whole: bool = True) -> None:
    """Print a result in the form that was asked for; as a table, a comparison is cut to a screen unless
    `whole`."""
    from rich.text import Text

    from overlap_bench.harness.common.consoles import Console, readable
    from overlap_bench.harness.report import formats

    if format is not Format.TABLE:
        write = {
            Format.JSON: formats.to_json,
            Format.CSV: formats.to_csv,
            Format.MARKDOWN: formats.to_markdown,
        }[format]
        text = write(found)
        text = json_for(sys.stdout, visible_json(text)) if format is Format.JSON else visible(text)
        with readable():
            sys.stdout.write(text)
        return
    screen = Console()
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen = Console(width=PIPE_WIDTH)
    for part in formats.to_terminal(found, screen.width, whole):
        # A line that goes to a file stays one: `head -1` is the whole answer.
        screen.print(part, soft_wrap=isinstance(part, Text) and not screen.is_terminal)


def show_tables(tables: Sequence[Table]) -> None:
    """Print what is for a person alone."""
    from overlap_bench.harness.common.consoles import Console
    from overlap_bench.harness.report.page import terminal_table

    screen = Console()
    for table in tables:
        screen.print(*terminal_table(table, screen.width), sep="\n")
