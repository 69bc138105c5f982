"""How many bytes of a text a token stands for at most, read off a tokenizer.json: a text with more bytes than
that for each token of the context can't fit, and need not be tokenized to know it.

The longest token of the vocabulary tells, as long as nothing of a text vanishes on its way to the tokens. So
only tokenizers are judged that are built of parts known to keep all of it, the byte-level BPE of most models
among them. Of any other, nothing is claimed: a prompt that fits must never be refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

# Unicode's normal forms take no character away, but bytes: up to 4 of them become 1, as with "𝟎" in NFKC.
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
NORMALIZED_AWAY = 4
KEEPING = (
    "ByteLevel",
    "Digits",
    "FixedLength",
    "Metaspace",
    "UnicodeScripts",
)  # pre-tokenizers that drop nothing
SPLITTING = ("Punctuation", "Split")  # drop something only where their behavior says so


def most_bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """By the content of a tokenizer.json, as `Tokenizer.to_str` gives it; None: any number."""
    normalizers = _steps(tokenizer["normalizer"], "normalizers")
    splitters = _steps(tokenizer["pre_tokenizer"], "pretokenizers")
    added = tokenizer["added_tokens"]
    shrunk = prod(_shrinks(each) for each in normalizers)
    longest = _longest(
        tokenizer["model"], any(each["type"] == "ByteLevel" for each in normalizers + splitters)
    )
    if (
        not (shrunk and longest and all(map(_keeps, splitters)))
        or tokenizer["truncation"]
        or any(each["lstrip"] or each["rstrip"] for each in added)  # one takes any number of spaces along
    ):
        return None
    return shrunk * max([longest, *(len(each["content"].encode()) for each in added)])


def _steps(part: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    """A part of a tokenizer, one by one where it is a sequence."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[several] for step in _steps(each, several)]


def _shrinks(normalizer: Mapping[str, Any]) -> int:
    """How many bytes become one at most; 0: any number."""
    kind = normalizer["type"]
    if kind in NORMAL_FORMS:
        return NORMALIZED_AWAY
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")  # or a "Regex", which may match anything
        return int(bool(replaced) and len(normalizer["content"].encode()) >= len(replaced.encode()))
    return int(kind in ("ByteLevel", "Prepend"))


def _keeps(splitter: Mapping[str, Any]) -> bool:
    kind = splitter["type"]
    return kind in KEEPING or (kind in SPLITTING and splitter["behavior"] != "Removed")


def _longest(model: Mapping[str, Any], byte_level: bool) -> int:
    """The most bytes of a BPE's token; 0 for one that lacks a token for some byte, and would drop it, or take
    it together with others for one unknown token; and for any other model."""
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return 0
    vocabulary = model["vocab"]
    if byte_level:  # a character stands for a byte
        return max(map(len, vocabulary)) if vocabulary.keys() >= set(ByteLevel.alphabet()) else 0
    whole = model["byte_fallback"] and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    return max(len(token.encode()) for token in vocabulary) if whole else 0
