"""How many bytes a token stands for at most: never fewer than one really does, or nothing is claimed."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engines.overlap.presets import TOKENIZER_FILE
from harness.serve.token_bytes import NORMALIZED_AWAY, most_bytes_per_token

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
MUCH = 200_000  # letters


def preset() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_FILE))


def changed(change: Callable[[Tokenizer], Any]) -> Callable[[], Tokenizer]:
    """The presets' tokenizer with something about it changed."""

    def make() -> Tokenizer:
        tokenizer = preset()
        change(tokenizer)
        return tokenizer

    return make


def normalized(normalizer: Any) -> Callable[[], Tokenizer]:
    return changed(lambda tokenizer: setattr(tokenizer, "normalizer", normalizer))


def split(splitter: Any) -> Callable[[], Tokenizer]:
    parts = pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return changed(lambda tokenizer: setattr(tokenizer, "pre_tokenizer", parts))


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: spaces become a letter, and what has no token of its own becomes bytes."""
    vocabulary = {**BYTES, "▁": 256, "a": 257, "▁a": 258, "▁▁": 259, "é": 260}
    merges = [("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@cache
def per_token(tokenizer: Tokenizer) -> int | None:
    return most_bytes_per_token(json.loads(tokenizer.to_str()))


BOUNDED = {
    "byte-level": preset,
    "byte fallback": byte_fallback,
    "NFC": normalized(normalizers.NFC()),
    "NFKC": normalized(normalizers.NFKC()),
    "split": split(pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "digits and punctuation": split(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation()])
    ),
    "added": changed(lambda tokenizer: tokenizer.add_tokens([AddedToken("𝟎" * 50, normalized=True)])),
}


@cache
def bounded(name: str) -> Tokenizer:
    return BOUNDED[name]()


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" a-+|é\u0301𝟎")), max_size=200))
@example(text="-" * 400)
@example(text="𝟎" * 400)
@example(text=" " * 400)
@example(text="ι\u0308\u0301" * 100)
def test_no_token_stands_for_more_bytes_than_the_most(name: str, text: str) -> None:
    tokenizer = bounded(name)
    most = per_token(tokenizer)
    assert most is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= most * len(ids)


def unbounded() -> dict[str, tuple[Callable[[], Tokenizer], str]]:
    """Tokenizers of which nothing is claimed, and much text of which they make few tokens."""

    def truncating(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(10)

    def model(made: Any) -> Callable[[], Tokenizer]:
        return lambda: Tokenizer(made)

    letters = {letter: number for number, letter in enumerate(ALPHABET)}
    without = {letter: number for letter, number in letters.items() if letter != "Q"}
    prefixed = {**letters, "##a": 256}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def byte_level(made: Any) -> Callable[[], Tokenizer]:
        def make() -> Tokenizer:
            tokenizer = Tokenizer(made)
            tokenizer.pre_tokenizer = level
            return tokenizer

        return make

    return {
        "stripped": (normalized(normalizers.Strip()), " " * MUCH),
        "accents taken away": (normalized(normalizers.StripAccents()), "\u0301" * MUCH),
        "replaced by less": (normalized(normalizers.Replace("Q" * 1000, "a")), "Q" * MUCH),
        "replaced by a pattern": (normalized(normalizers.Replace(Regex("Q+"), "aaaa")), "Q" * MUCH),
        "one of several": (
            normalized(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("Q", "")])),
            "Q" * MUCH,
        ),
        "split and removed": (split(pre_tokenizers.Split("Q", "removed")), "Q" * MUCH),
        "punctuation removed": (split(pre_tokenizers.Punctuation("removed")), "!" * MUCH),
        "split at white space": (split(pre_tokenizers.WhitespaceSplit()), " " * MUCH),
        "spaces taken along to the left": (
            changed(lambda tokenizer: tokenizer.add_tokens([AddedToken("<x>", lstrip=True)])),
            " " * MUCH + "<x>",
        ),
        "spaces taken along to the right": (
            changed(lambda tokenizer: tokenizer.add_tokens([AddedToken("<x>", rstrip=True)])),
            "<x>" + " " * MUCH,
        ),
        "truncated": (changed(truncating), "Q" * MUCH),
        "a byte without a token": (byte_level(models.BPE(without, [])), "Q" * MUCH),
        "letters inside of words without a token": (
            byte_level(models.BPE(prefixed, [], continuing_subword_prefix="##")),
            "Q" * MUCH,
        ),
        "letters without a token": (
            model(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
            "Q" * MUCH,
        ),
        "a long word without a token": (model(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), "Q" * MUCH),
        "any word without a token": (model(models.WordLevel({"?": 0}, unk_token="?")), "Q" * MUCH),
        "pieces without a token": (model(models.Unigram([("?", 0.0), ("a", -1.0)], 0)), "Q" * MUCH),
    }


@pytest.mark.parametrize("name", unbounded())
def test_nothing_is_claimed_of_a_tokenizer_that_makes_little_of_much(name: str) -> None:
    make, text = unbounded()[name]
    tokenizer = make()
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(text) > longest * len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert per_token(tokenizer) is None


@pytest.mark.parametrize(("apart", "together"), [("NFD", "NFC"), ("NFKD", "NFKC")])
def test_a_normal_form_makes_no_more_bytes_one_than_that(
    apart: Literal["NFD", "NFKD"], together: Literal["NFC", "NFKC"]
) -> None:
    """Of any text: every character's share in the bytes that its parts may have come from."""
    parts = {
        character: found
        for character in (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
        if (found := unicodedata.normalize(apart, character)) != character
    }
    came_from = {part: float(len(part.encode())) for each in parts.values() for part in each}
    for character, each in parts.items():
        for part in each:
            came_from[part] = max(came_from[part], len(character.encode()) / len(each))
    for character in {*parts, *came_from}:
        for form in (apart, together):
            if unicodedata.is_normalized(form, character):
                before = sum(came_from[part] for part in parts.get(character, character))
                assert before <= NORMALIZED_AWAY * len(character.encode())
