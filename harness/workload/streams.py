"""Random numbers: a stream for each purpose, so that changing one option reshuffles nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line must not wait for numpy
    import numpy as np


# The index is part of the seed: new purposes go to the end.
PURPOSES = ("arrivals", "input_tokens", "max_new_tokens", "prompts", "leads", "trace")


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """The numbers of one purpose under a round's seed; with a `key`, of one thing within that purpose: the
    child that numpy.random.SeedSequence(seed).spawn would give at that index, independent of every other."""
    import numpy as np

    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))
