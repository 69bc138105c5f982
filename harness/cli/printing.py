"""A result on stdout, in the form that `--format` asks for; and how a command ends. This is the only place
where an error becomes a line on stderr and an exit code:

0 done (undecided included), 1 outputs differ where they must not, or a gate fails, 2 bad usage or input, 3 a
gate is undecided, 4 an engine or the run failed (also where its result can't be written), 130 Ctrl-C, 143
SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from overlap_bench.engines import api
from overlap_bench.engines.shortages import shortage
from overlap_bench.harness.common.formatting import visible, visible_json
from overlap_bench.harness.common.processes import Interrupted, notes

if TYPE_CHECKING:
    from msgspec import Struct

    from overlap_bench.harness.report.page import Table

PIPE_WIDTH = 120  # columns of a table that goes to no terminal
OUTPUTS_DIFFER, USAGE, FAILED, INTERRUPTED = 1, 2, 4, 130
GATE_FAILED, GATE_UNDECIDED, NO_CULPRIT = 1, 3, 3
LONGEST = 1500  # characters of an error: what was typed, or a file holds, may have any number
# How characters are written that a stream can't write, as in the C locale: they end nothing.
PLAIN = {
    "−": "-", "–": "-", "→": "->", "±": "+/-", "×": "x", "·": "*", "•": "*", "…": "...", "µ": "u", "≤": "<=",
    "≥": ">=", "↑": "^", "↓": "v", "▲": "^", "▼": "v", "²": "2", "§": "section", "─": "-", "│": "|",
}  # fmt: skip
HANDLER = "plainly"
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException of whichever click this typer brings


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"


def end_with(found: Struct, format: Format, outputs_differ: bool, whole: bool = True) -> NoReturn:
    """Print a result, and end the command with the exit code that it stands for."""
    show(found, format, whole)
    raise typer.Exit(OUTPUTS_DIFFER if outputs_differ else 0)


def show(found: Struct, format: Format, whole: bool = True) -> None:
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
    from overlap_bench.harness.common.consoles import Console
    from overlap_bench.harness.report.page import terminal_table

    screen = Console()
    for table in tables:
        screen.print(*terminal_table(table, screen.width), sep="\n")


def run(command: Any) -> NoReturn:
    """Run what typer made of the command line, and exit."""
    # A stream that was closed before the process began is None, and writing to it would raise.
    sys.stdout, sys.stderr = map(open_to_all, (sys.stdout, sys.stderr))
    try:
        code = command.main(prog_name="bench", standalone_mode=False)
    except Interrupted as error:
        code = _complain(str(error), error, error.code)
    except CLICK_ERROR as error:  # what typer found wrong with the command line; empty where it gave help
        said = _usage(error)
        code = _complain(said, error, USAGE) if said else USAGE
    except (api.BadSetting, api.EngineError) as error:
        ends = USAGE if isinstance(error, api.BadSetting) else FAILED
        code = _complain("; ".join([str(error), *notes(error)]), error, ends)
    except Exception as error:
        # Nobody but a person makes such paths.
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            code = _complain(f"{error.strerror}: {error.filename}", error, USAGE)
        else:
            what = shortage(error) or f"unexpected {type(error).__name__}: {error}"
            code = _complain("; ".join([what, *notes(error), "--debug shows where"]), error, FAILED)
    else:
        if code == INTERRUPTED:  # typer's code for a Ctrl-C outside of a measurement; it says nothing
            say("interrupted")
    _flush()
    sys.exit(code or 0)


def _usage(error: Any) -> str:
    """What is wrong with the command line; where nothing is suggested, the help that shows what is right."""
    said: str = error.format_message().rstrip(".").replace("Value error, ", "")  # pydantic's words
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if said and context and not said.endswith("?") else ""
    return said + hint


def _flush() -> None:
    """Drop what can't be written any more: Python would try again at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            from overlap_bench.harness.common.consoles import discard

            discard(stream)


def say(line: str) -> None:
    with suppress(OSError):  # a terminal that was closed, a reader that is gone: the exit code still counts
        sys.stderr.write(f"bench: {visible(line)}\n")


def _complain(message: str, error: BaseException, code: int) -> int:
    """The one line; with --debug what is known besides: the traceback, and a dead process's own words."""
    if "--debug" in sys.argv:
        import traceback

        traceback.print_exception(error)
        sys.stderr.write(getattr(error, "details", ""))
    line = " ".join(message.split())
    say(line if len(line) <= LONGEST else f"{line[:LONGEST]}...")
    return code


def open_to_all(stream: TextIO | None) -> TextIO:
    """The stream, which from now on writes whatever it is given (one that is no file does so by itself); for
    None, as where it was closed before the process began, one that goes nowhere."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=HANDLER)
    return stream


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """One character; a byte of a file's name that is no text goes out as it came."""
    assert isinstance(error, UnicodeEncodeError)
    character, after = error.object[error.start], error.start + 1
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), after
    return PLAIN.get(character, "?"), after


def json_for(stream: TextIO, text: str) -> str:
    """The same JSON, in ASCII where the stream can't write it as it is: its strings are not to change."""
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return "".join(each if each.isascii() else json.dumps(each)[1:-1] for each in text)
    return text


codecs.register_error(HANDLER, _plainly)
