"""The events of a Chrome trace file, plain or gzipped, some thousands at a time: the file as a whole would
take several times its size in memory, and a small gzipped one can be any size."""

from __future__ import annotations

import codecs
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import msgspec

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.trace import chrome_repair
from overlap_bench.harness.trace.chrome_repair import Place

GZIP = b"\x1f\x8b"
CHUNK = 4 << 20  # bytes of JSON that are read at a time
LARGEST = 128 << 20  # bytes without an event that ends: no trace
# Traces are packed to a tenth or a thirtieth. What gzip packs a thousand times is one byte over and over.
PACKED_AT_MOST, NEVER_TOO_LARGE = 100, 64 << 20
BORDER = re.compile(rb"}\s*,\s*{")  # between two events, and in the arguments of some
BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
TRIES = 4  # borders that may be an argument's, at the end of a chunk
LONG_US = (
    1e12  # from here on, 12 days, a float of us does not hold ns: times since the epoch, or a long uptime
)
MARKS = b"\xef\xbb\xbf\xff\xfe\0 \t\r\n"  # that may stand in front, or between the bytes of UTF-16
ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    b"{\0": "utf-16-le",
    b"[\0": "utf-16-le",
    b"\0{": "utf-16-be",
    b"\0[": "utf-16-be",
}

Number = TypeVar("Number")


class Event(msgspec.Struct, Generic[Number], gc=False):
    """One event. `args` stays text until somebody asks: for most, nobody does. `rank`: of a merged trace,
    where it says so in the event or in its arguments."""

    ph: str = ""
    name: str | None = ""
    cat: str = ""
    ts: Number = math.nan  # type: ignore[assignment]
    dur: float = math.nan
    pid: int | str = 0
    tid: int | str = 0
    id: int | str | None = None
    rank: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def track(self) -> tuple[int | str, int | str, int | str | None]:
        return (self.pid, self.tid, self.rank)


class Document(msgspec.Struct, Generic[Number], rename="camel"):
    """The form that is an object."""

    trace_events: list[Event[Number]]


class Ranked(msgspec.Struct):
    """Arguments that tools write that merge the traces of ranks."""

    rank: int | str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The next events. `exact`: their `ts` are whole numbers and decimals, for floats would lose ns. `odd`:
    texts of what is no event. `cut`: the file ends before its last event does, or before its list."""

    events: list[Event[Any]]
    exact: bool
    odd: tuple[bytes, ...] = ()
    cut: bool = False


class _Decoders:
    def __init__(self, number: Any) -> None:
        self.events = msgspec.json.Decoder(list[Event[number]], strict=False)
        self.event = msgspec.json.Decoder(Event[number], strict=False)
        self.document = msgspec.json.Decoder(Document[number], strict=False)


FLOATS, EXACT = _Decoders(float), _Decoders(int | Decimal)
ANYTHING = msgspec.json.Decoder(float_hook=Decimal)
RANKED = msgspec.json.Decoder(Ranked, strict=False)


def begins(start: bytes) -> bool:
    """Whether a file that starts like this may be a Chrome trace."""
    return start.startswith(GZIP) or start.lstrip(MARKS)[:1] in (b"{", b"[")


def batches(path: Path) -> Iterator[Batch]:
    """Every event, in the file's order. Raises BadFile where it can't be unpacked, and what msgspec raises
    where it is no JSON, or no trace."""
    head, rest = b"", b""  # up to the first event; what is read and not yet handed out
    chunks, exact = _Chunks(path), False
    for chunk in chunks:
        rest += chunk
        if not head:
            if rest.lstrip()[:1] == b"[":
                head, _, rest = rest.partition(b"[")
                head += b"["
            elif found := BEGIN.search(rest):
                head, rest = rest[: found.end()], rest[found.end() :]
        split = _split(rest, exact) if head else None
        if split is None and head and BORDER.search(rest):
            split = _mended(rest, exact, last=False)
        if split is not None:
            batch, place = split
            exact = batch.exact
            yield batch
            if place.closed:
                return
            rest = place.rest
        if len(rest) > LARGEST:
            raise BadFile(f"{path} is not a Chrome trace: {LARGEST >> 20} MiB of it without an event")
    yield _last(head, rest, exact, chunks.cut)


def _last(head: bytes, rest: bytes, exact: bool, cut: bool) -> Batch:
    whole = head + rest
    listed = whole.lstrip()[:1] == b"["
    try:
        if listed:
            return _decoded(lambda of: of.events.decode(whole), exact, rest)
        return _decoded(lambda of: of.document.decode(whole).trace_events, exact, rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if not head:
            raise
    batch, place = _mended(rest, exact, last=True)
    # A list may lack its bracket: whoever writes one as the program runs never learns where it ends.
    cut = cut or bool(place.rest.strip()) or not (place.closed or listed)
    return replace(batch, cut=cut)


def _split(text: bytes, exact: bool) -> tuple[Batch, Place] | None:
    """The events of `text`, which begins with one, up to the last border between two, and what is behind it;
    None where none is found. A border within an event's arguments shows: what is before it is no list."""
    borders = _borders(text)
    for border in borders:
        try:
            return _decoded_list(text[: border.start() + 1], exact), _behind(text, border)
        except msgspec.ValidationError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    for border in borders[:1]:
        try:  # what is odd all over the file, as an inf in each event, is mended all at once
            return _decoded_list(chrome_repair.repaired(text[: border.start() + 1]), exact), _behind(
                text, border
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _borders(text: bytes) -> list[re.Match[bytes]]:
    """The last few, from the end on."""
    at = len(text)
    found: list[re.Match[bytes]] = []
    while len(found) < TRIES and (at := text.rfind(b"}", 0, at)) >= 0:
        border = BORDER.match(text, at)
        if border is not None:
            found.append(border)
    return found


def _behind(text: bytes, border: re.Match[bytes]) -> Place:
    return Place(text[border.end() - 1 :], closed=False)


def _decoded_list(events: bytes, exact: bool) -> Batch:
    return _decoded(lambda of: of.events.decode(b"[%b]" % events), exact, events)


def _decoded(decode: Callable[[_Decoders], list[Event[Any]]], exact: bool, text: bytes) -> Batch:
    """The events of a text, exact where they were so before, or one is late enough."""
    events = decode(EXACT if exact else FLOATS)
    if not exact and any(each.ts >= LONG_US for each in events):
        exact, events = True, decode(EXACT)
    return Batch(_ranked(events, text), exact)


def _mended(text: bytes, exact: bool, last: bool) -> tuple[Batch, Place]:
    """The events one by one, for something in the text is odd."""
    events: list[Event[Any]] = []
    odd: list[bytes] = []
    for item in chrome_repair.items(text, last, lambda each: _event(each, exact)):
        if isinstance(item, Place):
            if not exact and any(each.ts >= LONG_US for each in events):
                return _mended(text, True, last)
            return Batch(_ranked(events, text), exact, tuple(odd)), item
        if item.value is None:
            odd.append(item.text[:200])
        else:
            events.append(item.value)
    raise AssertionError("the last item is a place")


def _event(text: bytes, exact: bool) -> Event[Any] | None:
    """One event; of a field that is not what it should be, what can be made of it."""
    try:
        return (EXACT if exact else FLOATS).event.decode(text)
    except msgspec.ValidationError:
        found = ANYTHING.decode(text)
    if not isinstance(found, dict):
        return None

    def said(name: str) -> str:
        return found[name] if isinstance(found.get(name), str) else ""

    def number(name: str) -> Decimal:
        value = found.get(name)
        try:
            return Decimal(value) if isinstance(value, str | int | Decimal) else Decimal("nan")
        except InvalidOperation:
            return Decimal("nan")

    def known(name: str) -> int | str:
        value = found.get(name, 0)
        return value if isinstance(value, int | str) else str(value)

    args = found.get("args")
    return Event(
        ph=said("ph"),
        name=str(found.get("name", "")),
        cat=said("cat"),
        ts=number("ts") if exact else float(number("ts")),
        dur=float(number("dur")),
        pid=known("pid"),
        tid=known("tid"),
        id=known("id"),
        rank=known("rank") if "rank" in found else None,
        args=msgspec.Raw(msgspec.json.encode(args)) if isinstance(args, dict) else msgspec.Raw(b"{}"),
    )


def _ranked(events: list[Event[Any]], text: bytes) -> list[Event[Any]]:
    """The events, each with the rank that its arguments give."""
    if b'"rank"' in text:
        for each in events:
            if each.rank is None:
                try:
                    each.rank = RANKED.decode(each.args).rank
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
    return events


class _Chunks:
    """The text of a file, unpacked, as UTF-8. `cut`: what was packed ended too early."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut = False

    def __iter__(self) -> Iterator[bytes]:
        decoder: codecs.IncrementalDecoder | None = None
        first = True
        for chunk in self._unpacked():
            if first:
                first = False
                encoding = next((name for mark, name in ENCODINGS.items() if chunk.startswith(mark)), None)
                if encoding == "utf-8-sig":
                    chunk = chunk.removeprefix(codecs.BOM_UTF8)
                elif encoding:
                    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
            yield decoder.decode(chunk).encode() if decoder else chunk

    def _unpacked(self) -> Iterator[bytes]:
        with self._path.open("rb") as raw:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            most = max(NEVER_TOO_LARGE, PACKED_AT_MOST * self._path.stat().st_size)
            total = 0
            while chunk := self._packed(file) if packed else file.read(CHUNK):
                total += len(chunk)
                if packed and total > most:
                    raise BadFile(
                        f"{self._path} unpacks to more than {PACKED_AT_MOST} times its size, as no trace "
                        "does; if it is one, unpack it yourself"
                    )
                yield chunk

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
