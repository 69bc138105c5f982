"""Characters that a stream can't write, as in the C locale or where PYTHONIOENCODING says so: they are
written plainly, and end nothing."""

from __future__ import annotations

import codecs
import json
import os
from typing import TextIO

PLAIN = {
    "−": "-", "–": "-", "→": "->", "±": "+/-", "×": "x", "·": "*", "•": "*", "…": "...", "µ": "u", "≤": "<=",
    "≥": ">=", "↑": "^", "↓": "v", "▲": "^", "▼": "v", "²": "2", "§": "section", "─": "-", "│": "|",
}  # fmt: skip
HANDLER = "plainly"


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


codecs.register_error(HANDLER, _plainly)


def json_for(stream: TextIO, text: str) -> str:
    """The same JSON, in ASCII where the stream can't write it as it is: its strings are not to change."""
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return "".join(each if each.isascii() else json.dumps(each)[1:-1] for each in text)
    return text
