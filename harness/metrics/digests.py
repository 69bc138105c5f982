"""Digests of outputs: by them the outputs of two arms are compared, and no text is kept."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

TEXT = "text:"  # begins the digest of an output that came as text alone
EMPTY = blake2b(digest_size=16).hexdigest()  # of no tokens, and of no text


def of_tokens(token_ids: Sequence[int]) -> str:
    """BLAKE2b-128 of token ids as little-endian int64: equal digests are equal outputs."""
    return blake2b(np.array(token_ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()


def of_text(texts: Sequence[str]) -> str:
    """The same of a text that came in pieces: equal digests are equal texts, however they were cut."""
    found = blake2b("".join(texts).encode(), digest_size=16).hexdigest()
    return found if found == EMPTY else TEXT + found


def comparable(before: pd.Series, after: pd.Series) -> pd.Series:
    """Whether two digests are of outputs that can be compared, row by row: not token ids with text, as where
    one server was asked for ids and the other was not. An empty output can be compared with any."""
    alike = before.str.startswith(TEXT) == after.str.startswith(TEXT)
    return alike | (before == EMPTY) | (after == EMPTY)
