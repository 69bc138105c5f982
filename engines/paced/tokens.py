"""Which tokens a paced model answers with: they follow from the prompt and the index alone, so that any two
arms must give the same, and text, stop strings and detokenizing are real work."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

CANDIDATES = 4096  # ids: more would only take longer to look at
EOS_ONE_IN = 512
RIGHT = 0.5  # of drafts, once those before them are, where nobody says how many

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
    """The token that follows at each of `positions`: one of `words`, or now and then the end of the text."""
    mixed = _mixed(seeds, positions)
    ids: NDArray[np.int64] = words[(mixed >> np.uint64(16)) % np.uint64(len(words))]
    if eos is not None:
        ids = np.where(mixed % np.uint64(EOS_ONE_IN) == 0, eos, ids)
    return ids


def kept(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], rates: NDArray[np.float64]
) -> NDArray[np.int64]:
    """How many drafts are right, one after another, of those for the tokens at each row's `positions`.
    `rates`: how often a draft of that column is, where those before it are. It follows from the prompt and
    the index."""
    drawn = (_mixed(seeds, positions) >> np.uint64(11)) / float(1 << 53)
    found: NDArray[np.int64] = (drawn < rates).cumprod(axis=1).sum(axis=1)
    return found


def rates_of(unconditional: Sequence[float]) -> NDArray[np.float64]:
    """How often each draft is right where those before it are, of how often all up to it are."""
    shares = np.array(unconditional, np.float64)
    before = np.concatenate(([1.0], shares[:-1]))
    return np.divide(shares, before, out=np.zeros_like(shares), where=before > 0)


def words_of(decode: list[str]) -> NDArray[np.bool_]:
    """Which of these texts, of one token each, are text by themselves, and no part of a character."""
    return np.array([bool(text.strip()) and text.isprintable() and "\ufffd" not in text for text in decode])


def vocabulary(size: int, decode: Callable[[int], str]) -> NDArray[np.int64]:
    """The ids that answers are made of: of a tokenizer of that size, those that are text by themselves."""
    ids = np.random.default_rng(0).permutation(size)[:CANDIDATES]
    return ids[words_of([decode(each) for each in ids.tolist()])].astype(np.int64)


def _mixed(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """SplitMix64's mixing (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed: NDArray[np.uint64] = seeds + positions.astype(np.uint64) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed ^= mixed >> np.uint64(31)
    return mixed
