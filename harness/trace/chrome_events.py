"""The events of a Chrome trace file, plain or gzipped, some thousands at a time: the file as a whole would
take several times its size in memory, and a small gzipped one can be any size."""

from __future__ import annotations

import codecs
import gzip
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace.chrome_repair import repaired

GZIP = b"\x1f\x8b"
CHUNK = 4 << 20  # bytes of JSON that are read at a time
LARGEST = 128 << 20  # bytes without an event that ends: no trace
# Traces are packed to a tenth or a thirtieth. What gzip packs a thousand times is one byte over and over.
PACKED_AT_MOST, NEVER_TOO_LARGE = 100, 64 << 20
LIST, OBJECT = re.compile(rb"\s*\["), re.compile(rb'"traceEvents"\s*:\s*\[')  # in front of the first event
BORDER = re.compile(rb"}\s*,\s*(?={)")  # between two events, and in the arguments of some
# Where an event may begin, whether the one before it ends or not.
NEXT = re.compile(rb"(?<=})\s*,\s*(?![\s\]])|,\s*(?={)")
END = re.compile(rb"(?<=})[\s,]*\]")  # of all events, and of a list in the arguments of some
CLOSED = re.compile(rb"\]\s*}?\Z")  # at the end of a file
BLANK = b" \t\r\n"
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T", bound=msgspec.Struct)


class Event(msgspec.Struct, gc=False):
    """One event. `ts`: no float, which would lose ns of a time since the epoch. `args` stays text until
    somebody asks: for most, nobody does. `rank`: of a merged trace, where it says so in the event or in its
    arguments."""

    ph: str = ""
    name: str | None = ""
    cat: str = ""
    ts: Decimal = Decimal("nan")
    dur: float = math.nan
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    rank: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def track(self) -> tuple[int | str, int | str, int | str | None]:
        return (self.pid, self.tid, self.rank)


class Ranked(msgspec.Struct):
    """Arguments that tools write that merge the traces of ranks."""

    rank: int | str | None = None


@dataclass(slots=True)
class Batch:
    """The next events. `odd`: texts of what is no event. `rest`: what may go on behind them. `closed`: the
    list of events ended. `cut`: the file ends before its last event does, or before its list."""

    events: list[Event]
    odd: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    closed: bool = False
    cut: bool = False


EVENT = msgspec.json.Decoder(Event, strict=False)
EVENTS = msgspec.json.Decoder(list[Event], strict=False)
RANKED = msgspec.json.Decoder(Ranked, strict=False)
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def begins(start: bytes) -> bool:
    """Whether a file that starts like this may be a Chrome trace."""
    return start.startswith(GZIP) or start.removeprefix(codecs.BOM_UTF8).lstrip(BLANK)[:1] in (b"{", b"[")


def batches(path: Path) -> Iterator[Batch]:
    """Every event, in the file's order. Raises BadFile where it can't be unpacked or is no trace, and what
    msgspec raises where it is no JSON."""
    head, rest = b"", b""  # up to the first event; what is read and not yet handed out
    chunks = _Chunks(path)
    for chunk in chunks:
        rest += chunk
        if not head and (found := LIST.match(rest) or OBJECT.search(rest)):
            head, rest = rest[: found.end()], rest[found.end() :]
        border = _border(rest) if head else None
        if border is not None:
            batch = _next(rest[: border.start() + 1])
            yield batch
            if batch.closed:
                return
            behind = border.start() + 1 if batch.rest else border.end()
            rest = batch.rest + rest[behind:]
        if len(rest) > LARGEST:
            raise BadFile(f"{path} is not a Chrome trace: {LARGEST >> 20} MiB of it without an event")
    if not head:
        msgspec.json.decode(rest)
        raise BadFile(f"{path} is JSON, but not a Chrome trace: it has no list of traceEvents")
    last = _one_by_one(rest)
    if CLOSED.search(last.rest):  # that is no event either
        last.odd.append(last.rest)
        last.closed = True
    # A list may lack its bracket: whoever writes one as the program runs never learns where it ends.
    last.cut = chunks.cut or not (last.closed or (head.lstrip()[:1] == b"[" and not last.rest))
    yield last


def _border(text: bytes) -> re.Match[bytes] | None:
    """The last one."""
    at = len(text)
    while (at := text.rfind(b"}", 0, at)) >= 0:
        if border := BORDER.match(text, at):
            return border
    return None


def _next(text: bytes) -> Batch:
    try:
        return Batch(_ranked(EVENTS.decode(b"[%b]" % text), text))
    except UNREADABLE:
        return _one_by_one(text)


def _one_by_one(text: bytes) -> Batch:
    """What begins like an event is one as soon as it can be read; what is before it and can't be is none."""
    found = Batch([])
    begins, since = [0, *(each.end() for each in NEXT.finditer(text))], 0
    for begin, end in pairwise([*begins, len(text)]):
        alone = _event(text[begin:end])
        event = alone or (_event(text[since:end]) if since < begin else None)
        if event is None:
            whole = (_event(text[since : last.start()]) for last in END.finditer(text, since, end))
            event = next(filter(None, whole), None)
            found.closed = event is not None
        if alone and since < begin:
            found.odd.append(text[since:begin])
        if event is not None:
            found.events.append(event)
            since = end
        if found.closed:
            break
    else:
        found.rest = text[since:].strip(BLANK + b",")
    _ranked(found.events, text)
    return found


def _event(text: bytes) -> Event | None:
    """The one event that a text is, as far as it can be read."""
    text = text.strip(BLANK + b",")
    try:
        event: Event | None = EVENT.decode(text)
    except UNREADABLE:
        event = readable(text, Event)
    return event if event and event.ph else None


def readable(text: bytes, kind: type[T]) -> T | None:
    """An object of JSON, or of what is not quite JSON; of a field that is not what it should be, its default.
    None where it is none."""
    try:
        said = FIELDS.decode(repaired(text))
    except UNREADABLE:
        return None
    known = {}
    for each in msgspec.structs.fields(kind):
        with suppress(KeyError, msgspec.ValidationError):
            known[each.name] = msgspec.json.decode(said[each.encode_name], type=each.type, strict=False)
    return kind(**known)


def _ranked(events: list[Event], text: bytes) -> list[Event]:
    """The events, each with the rank that its arguments give."""
    if b'"rank"' in text:
        for each in events:
            if each.rank is None:
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    each.rank = RANKED.decode(each.args).rank
    return events


class _Chunks:
    """The text of a file, unpacked. `cut`: what was packed ended too early."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut = False

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            most = max(NEVER_TOO_LARGE, PACKED_AT_MOST * self._path.stat().st_size)
            total = 0
            while chunk := self._packed(file) if packed else file.read(CHUNK):
                yield chunk if total else chunk.removeprefix(codecs.BOM_UTF8)
                total += len(chunk)
                if packed and total > most:
                    raise BadFile(
                        f"{self._path} unpacks to more than {PACKED_AT_MOST} times its size, as no trace "
                        "does; if it is one, unpack it yourself"
                    )

    def _packed(self, file: IO[bytes]) -> bytes:
        """A chunk; at the end of a file that is cut short, what there is of it."""
        parts, missing = [], CHUNK
        try:
            while missing > 0 and not self.cut and (part := file.read1(missing)):  # type: ignore[attr-defined]
                parts.append(part)
                missing -= len(part)
        except EOFError:
            self.cut = True
        except (gzip.BadGzipFile, zlib.error) as error:
            raise BadFile(f"cannot read {self._path}, its compressed data is damaged: {error}") from None
        return b"".join(parts)
