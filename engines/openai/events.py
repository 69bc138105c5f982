"""Server-sent events (the HTML standard, 9.2.6) out of the pieces in which a stream was read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Atomic: what begins with \r\n is one end of a line, not \r and then \n.
LINE_END = re.compile(rb"(?>\r\n|\n|\r)")
BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
BOM = b"\xef\xbb\xbf"


def split(pieces: Sequence[bytes]) -> tuple[list[tuple[int, bytes]], bytes]:
    """The data of each event with the index of the piece that completed it, and what was left unfinished.

    Data in several lines is joined by newlines. Comments, and events without data, are none.
    """
    found: list[tuple[int, bytes]] = []
    rest = b""
    for index, piece in enumerate(pieces):
        if not rest and piece[:6] == b"data: " and piece[-2:] == b"\n\n" and piece.count(b"\n") == 2:
            found.append((index, piece[6:-2].rstrip(b"\r") if b"\r" in piece else piece[6:-2]))
            continue
        rest = rest + piece if rest else piece
        start = 0
        while (end := BLANK_LINE.search(rest, start)) is not None:
            data = data_of(rest[start : end.start()])
            if data is not None:
                found.append((index, data))
            start = end.end()
        rest = rest[start:]
    return found, rest


def data_of(block: bytes) -> bytes | None:
    """The data of one event, from its lines; None where it has none."""
    lines = []
    for line in LINE_END.split(block.removeprefix(BOM)):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
