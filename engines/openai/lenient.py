"""JSON as servers and gateways send it, read as JavaScript's clients read it: nothing that was streamed is
lost to half a character, a count that is written 12.0, or a text in parts. Pure."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

import msgspec

TEXTS = ("text", "content", "thinking", "summary", "refusal", "value")  # what holds the text of a part
MOST = 1 << 53  # a count beyond it is none


def decode(data: bytes) -> Any:
    """Any JSON; what is no UTF-8 in it is replaced. Raises ValueError."""
    try:
        return msgspec.json.decode(data)  # many times as fast
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8-sig", "replace"), strict=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def count(value: Any) -> int | None:
    """A count, however it is written: 12, 12.0, "12"; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return int(found) if 0 <= found < MOST and found.is_integer() else None


def text(value: Any) -> str:
    """What a content says: a string, or a part, or a list of them; "" for anything else."""
    match value:
        case str():
            return value
        case list():
            return "".join(map(text, value))
        case dict():
            return text(next((value[name] for name in TEXTS if value.get(name)), None))
    return ""


def members(value: Any, name: str) -> list[dict[str, Any]]:
    """The objects in the list of that name; none where it is null, something else, or missing."""
    found = value.get(name) if isinstance(value, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def member(value: dict[str, Any], name: str) -> dict[str, Any]:
    """The object of that name; an empty one where it is null, something else, or missing."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def whole_characters(texts: Sequence[str]) -> list[str]:
    """The same texts with each character whose two halves (of a surrogate pair) came apart in the text where
    its second half came, and half a character alone replaced: neither can be encoded."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        joining = codecs.getincrementaldecoder("utf-16-le")("replace")
        found = [joining.decode(each.encode("utf-16-le", "surrogatepass")) for each in texts]
        found[-1] += joining.decode(b"", final=True)
        return found
    return list(texts)
