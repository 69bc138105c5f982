"""How long the programs of a paced device take (`--pace`): a model that stands in for a device's speed.

A pace is a text, of a profile in engines/profiles.toml or of one's own:

    10ms                                             every program
    decode=10ms+0.05ms*batch,prefill=2ms+80us*tokens
    decode=batch[1:19ms 32:25ms]+1ns*batch*context,prefill=40us*tokens

`batch` counts the rows of a program, `tokens` those of a prefill, `context` how far back each row of a decode
reaches. All are a program's own: padding counts, as it does in a captured graph. `batch[…]` goes in straight
lines from point to point, and is level before the first and after the last.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import msgspec

from overlap_bench.engines.api.errors import BadFile, BadSetting

PROFILES = Path(__file__).parents[1] / "profiles.toml"

_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|ms|s)")
_TABLE = re.compile(r"(\w+)\[([^\]]*)\]")
_LONGEST_NS = 60e9  # of one program: beyond it the engine would be taken for dead


class Size(msgspec.Struct, frozen=True):
    """What a program works on, padding included."""

    kind: str  # "decode" or "prefill"
    batch: int
    tokens: int
    context: int
    times: int = 1  # steps of that size that it runs, one after another


class Term(msgspec.Struct, frozen=True):
    """`ns` times each of `factors`; or, with `points` (value, ns), a line through those of the one factor."""

    ns: float = 0.0
    factors: tuple[str, ...] = ()
    points: tuple[tuple[float, float], ...] = ()

    def of(self, size: Size) -> float:
        values: list[int] = [getattr(size, name) for name in self.factors]
        return _between(self.points, values[0]) if self.points else self.ns * prod(values)


class Pace(msgspec.Struct, frozen=True):
    """A device's speed. `name` is what results call it; `text` is all of it."""

    name: str
    text: str
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]

    def ns(self, size: Size) -> int:
        """How long a program of this size takes."""
        return round(size.times * self._once(size))

    def ns_of(self, sizes: Sequence[Size]) -> int:
        """How long a program takes that does all of these, the decode of some requests beside parts of the
        prompts of others. It reads the model's weights once: of what each kind takes whatever its size, only
        the most is counted."""
        shared = sorted(self._once(Size(size.kind, 0, 0, 0)) for size in sizes)
        return sum(map(self.ns, sizes)) - round(sum(shared[:-1]))

    def _once(self, size: Size) -> float:
        terms: tuple[Term, ...] = getattr(self, size.kind)
        return sum(term.of(size) for term in terms)


class PaceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device and a model whose speed somebody has published."""

    summary: str
    decode: str
    prefill: str
    source: str

    @property
    def text(self) -> str:
        return f"decode={self.decode},prefill={self.prefill}"


@cache
def profiles() -> dict[str, PaceProfile]:
    """By name. Raises BadFile where the file can't be understood."""
    import tomllib

    try:
        return msgspec.convert(tomllib.loads(PROFILES.read_text("utf-8")), dict[str, PaceProfile])
    # msgspec's ValidationError and TOMLDecodeError are ValueErrors.
    except (OSError, ValueError, RecursionError) as error:
        raise BadFile(f"{PROFILES}: {error}") from error


def make_pace(text: str) -> Pace:
    """The pace of that profile's name, or the one that the text says. Raises BadSetting."""
    profile = profiles().get(text)
    whole = profile.text if profile else text
    if not profile and not re.match(r"[\d.]|decode=|prefill=", text):
        raise BadSetting(
            f"there is no pace '{text}': one of {', '.join(profiles())}, or 10ms, or "
            "decode=10ms+0.05ms*batch,prefill=80us*tokens"
        )
    parts = dict.fromkeys(("decode", "prefill"), whole)
    if "=" in whole:
        pairs = [part.partition("=")[::2] for part in whole.split(",")]
        parts = dict(pairs)
        if sorted(name for name, _ in pairs) != ["decode", "prefill"]:
            raise BadSetting(f"a pace needs decode=… and prefill=…, not '{whole}'")
    return Pace(text, whole, _terms(parts["decode"], "decode"), _terms(parts["prefill"], "prefill"))


def _terms(text: str, kind: str) -> tuple[Term, ...]:
    factors = ("batch", "context") if kind == "decode" else ("batch", "tokens")
    return tuple(_term(each.strip(), kind, factors) for each in text.split("+"))


def _term(text: str, kind: str, factors: Sequence[str]) -> Term:
    table = _TABLE.fullmatch(text)
    if table and table[1] in factors:
        pairs = [pair.partition(":") for pair in table[2].split()]
        if pairs and all(number.isdigit() for number, _, _ in pairs):
            points = tuple((float(number), _duration(long)) for number, _, long in pairs)
            if [at for at, _ in points] == sorted({at for at, _ in points}):
                return Term(factors=(table[1],), points=points)
        raise BadSetting(f"a pace's {kind} '{text}' needs rising points: {table[1]}[1:19ms 32:25ms]")
    long, *names = (each.strip() for each in text.split("*"))
    if unknown := [name for name in names if name not in factors]:
        raise BadSetting(f"a pace's {kind} knows {' and '.join(factors)}, not '{unknown[0]}'")
    return Term(_duration(long), tuple(names))


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if not found:
        raise BadSetting(f"a pace needs times as 10ms, 0.05ms or 80us, not '{text}'")
    ns = float(found[1]) * _NS[found[2]]
    if ns > _LONGEST_NS:
        raise BadSetting(f"a pace of {text}: {_LONGEST_NS / 1e9:.0f}s at most")
    return ns


def _between(points: Sequence[tuple[float, float]], value: float) -> float:
    after = bisect_left(points, (value,))
    if after == 0 or after == len(points):
        return points[min(after, len(points) - 1)][1]
    (left, low), (right, high) = points[after - 1 : after + 1]
    return low + (high - low) * (value - left) / (right - left)
