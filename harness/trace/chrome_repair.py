"""Events out of text that is not quite JSON: what is odd costs itself, or its event, and no other.

Profilers write names with bytes and escapes that JSON does not allow, numbers that it does not have (inf,
nan), and nothing at all once they are killed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
LARGEST = 16 << 20  # bytes of one event; what goes on for longer has no end
ESCAPED = "overlap_bench.harness.trace.escaped"


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"\\\\x{byte:02x}" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(ESCAPED, _escape)
# What JSON allows: escapes, strings, numbers, words. Possessive: none of it is ever tried again.
PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
ALLOWED = rb'\\(?:["\\/bfnrt]|' + PAIR + rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
BEHIND = rb"(?=[\s,:\[\]{}]|\Z)"
SOUND = re.compile(
    rb'(?:[\s,:\[\]{}]++|"(?:[^"\\\x00-\x1f]++|' + ALLOWED + rb')*+"|'
    rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?"
    + BEHIND
    + rb"|(?:true|false|null)"
    + BEHIND
    + rb")*+"
)
STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
WORD = re.compile(rb'[^\s,:\[\]{}"]++')
NOT_ALLOWED = re.compile(ALLOWED + rb"|(\\|[\x00-\x1f])")
# Up to the next bracket that is in no string.
BRACKET = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]++|\\.)*+"[^"{}\[\]]*+)*+([{}\[\]])', re.DOTALL)
VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s,\[\]{}":]++', re.DOTALL)  # that is no object or list
EVENT = re.compile(rb'"ph"\s*:')
FIRST = re.compile(rb'\{\s*"ph"\s*:')  # how most writers begin one
STRAY = re.compile(rb"[\s,\]}]*+")  # what an event leaves that was given up before its end
BETWEEN = re.compile(rb"[\s,]*+")
NEXT = re.compile(rb"}[\s,]*+(?={)")  # the end of an event and the beginning of another, or of what is in one


@dataclass(frozen=True, slots=True)
class Item(Generic[T]):
    """A member of a list; `value` is None where it cannot be read."""

    text: bytes
    value: T | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the members of a list end: `rest` is not yet whole. `closed`: so is the list."""

    rest: bytes
    closed: bool


def items(text: bytes, last: bool, decode: Callable[[bytes], T]) -> Iterator[Item[T] | Place]:
    """The members of a list of which `text` is the next part, without the bracket in front of it, and then
    how far it went. `last`: nothing follows. `decode` raises what msgspec does."""
    at = 0
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] in (b"]", b"}"):
            if EVENT.search(text, at) is None:
                yield Place(b"", closed=True)
                return
            at = STRAY.match(text, at).end()  # type: ignore[union-attr]
            continue
        end = _end(text, at, last)
        if end is None and not _follows(text, at, last):
            yield Place(text[at:], closed=False)
            return
        value = None if end is None else _read(text[at:end], decode)
        if value is None:  # what is odd in it may have hidden where it ends
            end = min(end or len(text), _next(text, at))
        assert end is not None
        yield Item(text[at:end], value)
        at = end


def _next(text: bytes, at: int) -> int:
    """Where the event that begins there ends, by where the next one begins."""
    begins = FIRST.search(text, at + 1, at + LARGEST)
    until = begins.start() if begins else len(text)
    border = NEXT.search(text, at, at + LARGEST)
    while border:
        following = NEXT.search(text, border.end())
        if EVENT.search(text, border.end(), following.start() if following else len(text)):
            return min(until, border.start() + 1)
        border = following
    return until


def _follows(text: bytes, at: int, last: bool) -> bool:
    """Whether more events come behind one that does not end."""
    return _next(text, at) < len(text) if last else len(text) - at > LARGEST


def _end(text: bytes, at: int, last: bool) -> int | None:
    """Where the value that begins there ends."""
    if text[at : at + 1] not in (b"{", b"["):
        found = VALUE.match(text, at)
        if found is None:
            return None if at >= len(text) else at + 1
        return None if found.end() == len(text) and not last else found.end()
    depth = 0
    while bracket := BRACKET.match(text, at):
        at = bracket.end()
        depth += 1 if bracket[1] in b"{[" else -1
        if depth == 0:
            return at
    return None


def _read(text: bytes, decode: Callable[[bytes], T]) -> T | None:
    for change in (bytes, repaired):
        try:
            return decode(change(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None


def repaired(text: bytes) -> bytes:
    """The text as JSON: a word or number that JSON does not have as null, a byte or escape that it does not
    allow in a string as what people write for it."""
    text = text.decode("utf-8", ESCAPED).encode()
    parts, at = [], 0
    while at < len(text):
        sound = SOUND.match(text, at)
        parts.append(sound[0])  # type: ignore[index]
        at = sound.end()  # type: ignore[union-attr]
        if string := STRING.match(text, at):
            parts.append(b'"%b"' % NOT_ALLOWED.sub(_escaped, string[1]))
            at = string.end()
        elif word := WORD.match(text, at):
            parts.append(b"null")
            at = word.end()
        else:
            parts.append(text[at:])
            break
    return b"".join(parts)


def _escaped(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        return found[0]
    return b"\\\\" if found[1] == b"\\" else b"\\u%04x" % found[1][0]
