"""How many tokens a prompt or an output has: a number, or a distribution to draw from.

128                   always 128
uniform:16:128        every length from 16 to 128 equally often, both included
normal:64:16          mean 64, SD 16, rounded; clipped on both sides of the mean alike, at 4 SD or at
                      length 1, whichever is nearer, so that the mean stays what it says

And the random numbers that this and all else of a workload is drawn from: a stream for each purpose, so that
changing one option reshuffles nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlap_bench.engines.api import BadSetting, pick

if TYPE_CHECKING:  # the command line must not wait for numpy
    import numpy as np

FORMS = "a number, uniform:LOW:HIGH or normal:MEAN:SD"
# The index is part of the seed: new purposes go to the end.
PURPOSES = ("arrivals", "input_tokens", "max_new_tokens", "prompts", "leads", "trace")
REACH = 4  # SDs from the mean at which a normal distribution is clipped: 6 in 100,000 lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    """`most`: no draw is longer. `draw(count, random)`: so many lengths, each at least 1."""

    most: int
    draw: Callable[[int, np.random.Generator], list[int]]


def parse(value: int | str, name: str) -> Lengths:
    """The lengths that an option says. Raises BadSetting, one line that names the option."""
    if is_number(value):
        return fixed(int(value), name)
    kind, *numbers = str(value).split(":")
    if not numbers:
        raise BadSetting(f"{name} needs {FORMS}, not '{value}'")
    make = pick(kind, DISTRIBUTIONS, f"distribution of {name}")
    try:
        low, high = map(float, numbers)
    except ValueError:
        raise BadSetting(f"{name} needs {FORMS}, not '{value}'") from None
    lengths: Lengths = make(low, high, f"{name}={value}")
    return lengths


def is_number(value: int | str) -> bool:
    """Whether a length is one number, given as such or as text."""
    return isinstance(value, int) or value.removeprefix("-").isdecimal()


def fixed(length: int, name: str) -> Lengths:
    if length < 1:
        raise BadSetting(f"{name} must be at least 1, not {length}")
    return Lengths(length, lambda count, random: [length] * count)


def uniform(low: float, high: float, option: str) -> Lengths:
    if not (low.is_integer() and high.is_integer() and low >= 1):
        raise BadSetting(f"{option}: LOW and HIGH are numbers of tokens, at least 1")
    if low > high:
        raise BadSetting(f"{option}: LOW is above HIGH")
    first, last = int(low), int(high)
    return Lengths(last, lambda count, random: random.integers(first, last, count, endpoint=True).tolist())


def normal(mean: float, sd: float, option: str) -> Lengths:
    if not (1 <= mean < math.inf and 0 < sd < math.inf):
        raise BadSetting(f"{option}: MEAN must be at least 1 and SD above 0")
    reach = min(mean - 1, REACH * sd)

    def draw(count: int, random: np.random.Generator) -> list[int]:
        import numpy as np

        lengths = np.clip(random.normal(mean, sd, count), mean - reach, mean + reach)
        return [round(length) for length in lengths.tolist()]

    return Lengths(round(mean + reach), draw)


DISTRIBUTIONS = {"uniform": uniform, "normal": normal}


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """The numbers of one purpose under a round's seed; with a `key`, of one thing within that purpose: the
    child that numpy.random.SeedSequence(seed).spawn would give at that index, independent of every other."""
    import numpy as np

    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *key)))
