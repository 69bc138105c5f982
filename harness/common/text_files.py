"""Text files that people and other programs wrote. A byte order mark, which Excel and PowerShell put in
front, is no part of the content; one of UTF-16 (PowerShell's `>`) says how to read the rest."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import TextIO

from overlap_bench.engines.api import BadFile

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SURROGATE = re.compile("[\ud800-\udfff]")  # in place of what is no text: bytes of a command line, half a pair


@contextmanager
def text_file(path: Path) -> Iterator[TextIO]:
    """Open a text to read it line by line, line ends as they are. Raises BadFile, one line, also where what
    is read inside turns out to be no text."""
    with _binary(path) as file:
        encoding = "utf-16" if file.peek(2).startswith(UTF_16) else "utf-8-sig"
        yield TextIOWrapper(file, encoding=encoding, newline="")


def read_utf8(path: Path) -> bytes:
    """The whole content as UTF-8: JSON is read from that with the least memory. Raises BadFile, one line."""
    with _binary(path) as file:
        content = file.read()
        if content.startswith(UTF_16):
            return content.decode("utf-16").encode()
        return content.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path) -> str:
    """The whole content. Raises BadFile, one line."""
    with text_file(path) as file:
        return file.read()


@contextmanager
def _binary(path: Path) -> Iterator[BufferedReader]:
    if path.is_char_device() or path.is_block_device():  # /dev/zero never ends
        raise BadFile(f"{path} is a device, not a file")
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from None
    except UnicodeError:
        raise BadFile(f"cannot read {path}: it is not UTF-8 text") from None
