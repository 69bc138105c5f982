"""JSON out of text that is not quite JSON: profilers write names with bytes and escapes that JSON does not
allow, and numbers that it does not have (inf, nan)."""

from __future__ import annotations

import codecs
import re

ESCAPED = "overlap_bench.harness.trace.escaped"


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"\\\\x{byte:02x}" for byte in error.object[error.start : error.end]), error.end


codecs.register_error(ESCAPED, _escape)
PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
ALLOWED = rb'\\(?:["\\/bfnrt]|' + PAIR + rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
NOT_ALLOWED = re.compile(ALLOWED + rb"|(\\|[\x00-\x1f])")
# A string, or a number or a word. Possessive: none of it is ever tried again.
TOKEN = re.compile(rb'"((?:[^"\\]++|\\.)*+)"|[^\s,:\[\]{}"]++', re.DOTALL)
KNOWN = re.compile(rb"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def repaired(text: bytes) -> bytes:
    """The text as JSON: a word or number that JSON does not have as null, a byte or escape that it does not
    allow in a string as what people write for it."""
    return TOKEN.sub(_sound, text.decode("utf-8", ESCAPED).encode())


def _sound(token: re.Match[bytes]) -> bytes:
    if token[1] is not None:
        return b'"%b"' % NOT_ALLOWED.sub(_escaped, token[1])
    return token[0] if KNOWN.fullmatch(token[0]) else b"null"


def _escaped(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        return found[0]
    return b"\\\\" if found[1] == b"\\" else b"\\u%04x" % found[1][0]
