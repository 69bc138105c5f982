"""Which tokens a paced model answers with: they follow from the prompt and the index alone, so that any two
arms must give the same, and text, stop strings and detokenizing are real work."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

CANDIDATES = 4096  # ids: more would only take longer to look at
EOS_ONE_IN = 512

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def seed_of(prompt: Sequence[int], seed: int | None) -> int:
    """What a request's tokens follow from; `seed`: of its sampling, if it has one."""
    ids = np.asarray(prompt, dtype=np.int64)
    return zlib.crc32(ids.tobytes()) | (0 if seed is None else (seed & 0xFFFFFFFF) << 32)


def draw(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], words: NDArray[np.int64], eos: int | None
) -> NDArray[np.int64]:
    """The token that follows at each of `positions`: one of `words`, or now and then the end of the text.
    (The mixing is SplitMix64's: Steele et al., OOPSLA 2014.)"""
    with np.errstate(over="ignore"):
        mixed = seeds + positions.astype(np.uint64) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed ^= mixed >> np.uint64(31)
    ids: NDArray[np.int64] = words[(mixed >> np.uint64(16)) % np.uint64(len(words))]
    if eos is not None:
        ids = np.where(mixed % np.uint64(EOS_ONE_IN) == 0, eos, ids)
    return ids


def words_of(decode: list[str]) -> NDArray[np.bool_]:
    """Which of these texts, of one token each, are text by themselves, and no part of a character."""
    return np.array([bool(text.strip()) and text.isprintable() and "\ufffd" not in text for text in decode])


def vocabulary(size: int, decode: Callable[[int], str]) -> NDArray[np.int64]:
    """The ids that answers are made of: of a tokenizer of that size, those that are text by themselves."""
    ids = np.random.default_rng(0).permutation(size)[:CANDIDATES]
    return ids[words_of([decode(each) for each in ids.tolist()])].astype(np.int64)
