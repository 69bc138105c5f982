"""The events of a Chrome trace file, plain or gzipped, some thousands at a time: the file as a whole would
take several times its size in memory, and a small gzipped one can be any size."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec
from msgspec import Meta

from engines.api import BadFile

GZIP = b"\x1f\x8b"
CHUNK = 4 << 20  # bytes of JSON that are read at a time
LARGEST = 128 << 20  # bytes without an event that ends: no trace
# Traces are packed to a tenth or a thirtieth. What gzip packs a thousand times is one byte over and over.
PACKED_AT_MOST, NEVER_TOO_LARGE = 100, 64 << 20
BORDER = re.compile(rb"}\s*,\s*{")  # between two events, and in the arguments of some
BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
FARTHEST_US = 2.5e15  # of a time from 0, in the year 2049; sums of three still fit into 64 bits as ns
Us = Annotated[float, Meta(ge=-FARTHEST_US, le=FARTHEST_US)]
TRIES = 4  # borders that may be an argument's, at the end of a chunk


class Event(msgspec.Struct, gc=False):
    """One event. `args` stays text until somebody asks: for most, nobody does."""

    ph: str = ""
    name: str | None = ""
    cat: str = ""
    ts: Us = 0.0
    dur: Us = 0.0
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def track(self) -> tuple[int | str, int | str]:
        return self.pid, self.tid


class Document(msgspec.Struct, rename="camel"):
    """The form that is an object."""

    trace_events: list[Event]


EVENTS, DOCUMENT = msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(Document)


def batches(path: Path) -> Iterator[list[Event]]:
    """Every event, in the file's order. Raises BadFile where it can't be unpacked, and what msgspec raises
    where it is no JSON, or no trace."""
    head, rest = b"", b""  # up to the first event; what is read and not yet handed out
    for chunk in _chunks(path):
        rest += chunk
        if not head:
            if rest.lstrip()[:1] == b"[":
                head, _, rest = rest.partition(b"[")
                head += b"["
            elif found := BEGIN.search(rest):
                head, rest = rest[: found.end()], rest[found.end() :]
        split = _split(rest) if head else None
        if split is not None:
            decoded, rest = split
            yield decoded
        elif len(rest) > LARGEST:
            raise BadFile(f"{path} is not a Chrome trace: {LARGEST >> 20} MiB of it without an event")
    whole = head + rest
    yield EVENTS.decode(whole) if whole.lstrip()[:1] == b"[" else DOCUMENT.decode(whole).trace_events


def _split(text: bytes) -> tuple[list[Event], bytes] | None:
    """The events of `text`, which begins with one, up to the last border between two, and what is behind it;
    None where none is found. A border within an event's arguments shows: what is before it is no list."""
    at, tries = len(text), 0
    while tries < TRIES and (at := text.rfind(b"}", 0, at)) >= 0:
        border = BORDER.match(text, at)
        if border is None:
            continue
        tries += 1
        try:
            return EVENTS.decode(b"[%b]" % text[: at + 1]), text[border.end() - 1 :]
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        packed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
        most = max(NEVER_TOO_LARGE, PACKED_AT_MOST * path.stat().st_size)
        total = 0
        while chunk := _read(path, file):
            total += len(chunk)
            if packed and total > most:
                raise BadFile(
                    f"{path} unpacks to more than {PACKED_AT_MOST} times its size, as no trace does; if it "
                    "is one, unpack it yourself"
                )
            yield chunk.removeprefix(codecs.BOM_UTF8) if total == len(chunk) else chunk


def _read(path: Path, file: IO[bytes]) -> bytes:
    try:
        return file.read(CHUNK)
    except EOFError:
        raise BadFile(f"{path} is cut short: the compressed data ends too early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadFile(f"cannot read {path}, its compressed data is damaged: {error}") from None
