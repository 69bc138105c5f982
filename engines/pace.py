"""How long the programs of a paced device take (`--pace`): a model that stands in for a device's speed.

A pace is a text: the name of a profile in engines/profiles.toml, a file that `bench pace record` wrote on a
card (NAME.toml), or one's own:

    10ms                                             every program
    decode=10ms+0.05ms*batch,prefill=2ms+80us*tokens
    decode=batch[1:19ms 32:25ms]+1ns*batch*context,prefill=40us*tokens,launch=4us,replay=20us

`batch` counts the rows of a program, `tokens` those of a prefill, `context` how far back each row of a decode
reaches. All are a program's own: padding counts, as it does in a captured graph. `batch[…]` goes in straight
lines from point to point, and is level before the first and after the last. `launch`, `replay`, `copy`, `pin`
and `wake` are the ledger: what a call into the driver takes, without Python. `name` is what results call it.

Behind any of them, `,ledger=2` has the driver's calls cost twice as much, and `,ledger=0` nothing.

At the end, `*2.3` stretches all times. `*k` stretches them by this host's slowness, so that host and device
keep the proportion that they have beside the card: `settle` measures k once, before a run, and puts the
number in its place. `*k/2` and `*2k` show what a conclusion owes to k.

Imports the standard library alone: what replays a pace lives in anybody's interpreter.
"""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from overlap_bench.engines import record_pace
from overlap_bench.engines.clock import Clock, Lateness, spend
from overlap_bench.engines.errors import BadFile, BadSetting
from overlap_bench.engines.record_pace import probe, probes

__all__ = [
    "Clock",
    "Lateness",
    "Ledger",
    "Pace",
    "PaceProfile",
    "Size",
    "Term",
    "make_pace",
    "probe",
    "profiles",
    "settle",
    "spend",
]

PROFILES = Path(__file__).parent / "profiles.toml"
ASSUMED = "assumed"  # the table of what profiles of public figures have not measured

_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_DURATION = re.compile(rf"({_NUMBER})(ns|us|ms|s)")
_TABLE = re.compile(r"(\w+)\[([^\]]*)\]")
_STRETCHED = re.compile(rf"(.*)\*({_NUMBER})", re.DOTALL)
_BY_HOST = re.compile(rf"(.*)\*({_NUMBER})?k(?:/({_NUMBER}))?", re.DOTALL)
_LEDGER_TIMES = re.compile(rf"(.*),\s*ledger=({_NUMBER})", re.DOTALL)
_FORMULA = re.compile(r"(?!.*\.toml$)([\d.]|\w+\s*=)")
_LONGEST_NS = 60e9  # of one program: beyond it the engine would be taken for dead


@dataclass(frozen=True)
class Size:
    """What a program works on, padding included."""

    kind: str  # "decode" or "prefill"
    batch: int
    tokens: int
    context: int
    times: int = 1  # steps of that size that it runs, one after another


@dataclass(frozen=True)
class Term:
    """`ns` times each of `factors`; or, with `points` (value, ns), a line through those of the one factor."""

    ns: float = 0.0
    factors: tuple[str, ...] = ()
    points: tuple[tuple[float, float], ...] = ()

    def of(self, size: Size) -> float:
        values: list[int] = [getattr(size, name) for name in self.factors]
        return _between(self.points, values[0]) if self.points else self.ns * prod(values)


@dataclass(frozen=True)
class Ledger:
    """Nanoseconds that a GPU's driver takes for a call, without the Python around it."""

    launch_ns: int = 0  # of a kernel: Triton's or an eager operation's
    replay_ns: int = 0  # of a CUDA graph
    copy_ns: int = 0  # a few KB, asynchronous, from pinned memory
    pin_ns: int = 0  # a few KB made pinned through the caching allocator
    wake_ns: int = 0  # from the end of an event to the thread that waited for it

    def times(self, factor: float) -> Ledger:
        return Ledger(*(round(factor * getattr(self, each.name)) for each in fields(self)))

    @property
    def text(self) -> str:
        """As in a pace: launch=5us,… of what is not 0."""
        costs = {each.name.removesuffix("_ns"): getattr(self, each.name) for each in fields(self)}
        return ",".join(f"{name}={ns / 1e3:.10g}us" for name, ns in costs.items() if ns)


COSTS = tuple(each.name.removesuffix("_ns") for each in fields(Ledger))


@dataclass(frozen=True)
class Pace:
    """A device's speed. `name` is what results call it; `text` is all of it, and makes the same pace
    anywhere. `ns` and `ledger` are stretched already."""

    name: str
    text: str
    decode: tuple[Term, ...]
    prefill: tuple[Term, ...]
    ledger: Ledger = Ledger()
    stretch: float = 1.0

    def ns(self, size: Size) -> int:
        return round(size.times * self._once(size))

    def ns_of(self, sizes: Sequence[Size]) -> int:
        """How long a program takes that does all of these, the decode of some requests beside parts of the
        prompts of others. It reads the model's weights once: of what each kind takes whatever its size, only
        the most is counted."""
        shared = sorted(self._once(Size(size.kind, 0, 0, 0)) for size in sizes)
        return sum(map(self.ns, sizes)) - round(sum(shared[:-1]))

    def _once(self, size: Size) -> float:
        terms: tuple[Term, ...] = getattr(self, size.kind)
        return self.stretch * sum(term.of(size) for term in terms)


@dataclass(frozen=True)
class PaceProfile:
    """A device and a model whose speed somebody has published, or recorded."""

    summary: str
    decode: str
    prefill: str
    source: str
    ledger: Ledger
    ledger_source: str
    host_ns: float  # what `probe` takes on its host
    host: str  # which host that is, or what is assumed of it
    assumed: tuple[str, ...] = ()  # what of it nobody measured: "ledger", "host"
    facts: Mapping[str, object] = field(default_factory=dict)  # of a recorded one, beside its times

    @property
    def text(self) -> str:
        return ",".join(filter(None, (f"decode={self.decode},prefill={self.prefill}", self.ledger.text)))


@cache
def profiles() -> dict[str, PaceProfile]:
    """By name, those that come with this package. Raises BadFile where the file can't be understood."""
    return _read(PROFILES)


def _read(path: Path) -> dict[str, PaceProfile]:
    """The profiles of a file. What one of them lacks is assumed: by the file's own table, or by the one of
    this package's."""
    try:
        import tomllib
    except ModuleNotFoundError as error:  # before Python 3.11
        raise BadFile(f"{path} needs Python 3.11; give the pace as decode=…,prefill=…") from error
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
        # TOMLDecodeError is a ValueError.
        own = tables.pop(ASSUMED, None)
        assumed = own if own is not None else tomllib.loads(PROFILES.read_text("utf-8"))[ASSUMED]
        return {name: _profile(table, assumed) for name, table in tables.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, BadSetting) as error:
        raise BadFile(f"{path}: {error or type(error).__name__}") from error


def _profile(table: dict[str, Any], assumed: Mapping[str, Any]) -> PaceProfile:
    missing = tuple(name for name in ("ledger", "host") if name not in table)
    given = {**assumed, **table}
    if ("host" in table) != ("host_ns" in table):
        raise ValueError("host and host_ns go together")
    if unknown := given.keys() - {each.name for each in fields(PaceProfile)} | {"assumed"} & given.keys():
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    ledger = dict(given.pop("ledger"))
    source = ledger.pop("source", given["source"])
    for name in ("summary", "decode", "prefill", "source", "host"):
        if not isinstance(given[name], str):
            raise TypeError(f"{name} is no text")
    if not given["host_ns"] > 0:
        raise ValueError(f"host_ns of {given['host_ns']}")
    return PaceProfile(**given, ledger=_ledger(ledger), ledger_source=source, assumed=missing)


def _ledger(costs: Mapping[str, str]) -> Ledger:
    if unknown := costs.keys() - set(COSTS):
        raise BadSetting(f"a ledger knows {', '.join(COSTS)}, not '{min(unknown)}'")
    return Ledger(**{f"{name}_ns": round(_duration(text)) for name, text in costs.items()})


def make_pace(text: str) -> Pace:
    """The pace of that profile's name, of that file, or the one that the text says. Raises BadSetting."""
    if _BY_HOST.fullmatch(text):
        raise BadSetting(f"k of the pace '{text}' is measured before a run; here it must be a number")
    found = _STRETCHED.fullmatch(text)
    base, stretch = (found[1].strip(), float(found[2])) if found else (text, 1.0)
    by = f"*{found[2]}" if found else ""
    if not 0.001 <= stretch <= 1000:
        raise BadSetting(f"a pace can be stretched 0.001 to 1000 times, not '{text}'")
    base, times, of_ledger = _ledger_times(base)
    if _FORMULA.match(base):
        name, whole = base, base
    else:
        name, profile = _named(base)
        whole = profile.text
    by = of_ledger + by
    parts = _parts(whole)
    name = parts.pop("name", name)
    decode, prefill = (_terms(parts.pop(kind), kind) for kind in ("decode", "prefill"))
    return Pace(name + by, whole + by, decode, prefill, _ledger(parts).times(times * stretch), stretch)


def _ledger_times(base: str) -> tuple[str, float, str]:
    """A pace without what it says of how much its ledger counts; that number; that text."""
    found = _LEDGER_TIMES.fullmatch(base)
    return (found[1].strip(), float(found[2]), f",ledger={found[2]}") if found else (base, 1.0, "")


def settle(text: str, python: str | None = None) -> str:
    """The same pace as a text that needs neither a file nor this host: its k is measured, by the interpreter
    `python` (this one), and what a file holds stands in place of its name. Raises BadSetting."""
    found = _BY_HOST.fullmatch(text) or _STRETCHED.fullmatch(text)
    base = found[1].strip() if found else text
    by = text[len(found[1]) :] if found else ""
    base, _, of_ledger = _ledger_times(base)
    name, profile = ("", None) if _FORMULA.match(base) else _named(base)
    if found and found.re is _BY_HOST:
        host = profile.host_ns if profile else next(iter(profiles().values())).host_ns
        share = float(found[3] or 1)
        if not share:
            raise BadSetting(f"a pace can be stretched by k/2, not '{text}'")
        k = float(f"{host_k(host, python) * float(found[2] or 1) / share:.3g}")
        by = "*" + f"{k:.6f}".rstrip("0").rstrip(".")
    settled = f"name={name},{profile.text}" if profile and base.endswith(".toml") else base
    make_pace(settled + of_ledger + by)
    return settled + of_ledger + by


def host_k(host_ns: float, python: str | None = None) -> float:
    """How many times as long Python takes here as on the host of a profile; measured once a process."""
    return _here(python) / host_ns


@cache
def _here(python: str | None) -> float:
    """What `probes` finds by that interpreter, which runs the engine: another release is faster or slower. By
    this one where that does not start; who boots it says why."""
    if python is None:
        return probes()
    try:
        command = [python, record_pace.__file__, "--probe"]
        return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return probes()


def _named(base: str) -> tuple[str, PaceProfile]:
    """The profile of that name, or of that file, and its name."""
    if base.endswith(".toml"):
        found = _read(Path(base))
        if len(found) != 1:
            raise BadFile(f"{base} has {len(found)} profiles: a pace needs a file with one")
        return next(iter(found.items()))
    if base not in profiles():
        raise BadSetting(
            f"there is no pace '{base}': one of {', '.join(profiles())}, or 10ms, or "
            "decode=10ms+0.05ms*batch,prefill=80us*tokens, or a file FILE.toml of bench pace record"
        )
    return base, profiles()[base]


def _parts(whole: str) -> dict[str, str]:
    """A pace's text by its parts; "decode" and "prefill" are among them."""
    first, *more = (part.strip() for part in whole.split(","))
    pairs = [part.partition("=")[::2] for part in more]
    if "=" in first:
        pairs.insert(0, first.partition("=")[::2])
    else:
        pairs += [("decode", first), ("prefill", first)]
    parts = {name.strip(): value.strip() for name, value in pairs}
    if len(parts) < len(pairs) or not {"decode", "prefill"} <= parts.keys():
        raise BadSetting(f"a pace needs decode=… and prefill=…, once each, not '{whole}'")
    if unknown := [name for name in parts if name not in ("name", "decode", "prefill", *COSTS)]:
        raise BadSetting(f"a pace has decode, prefill, name and {', '.join(COSTS)}, not '{unknown[0]}'")
    if not re.fullmatch(r"[\w.@+-]+", parts.get("name", "x")):
        raise BadSetting(f"a pace's name has letters, digits, '.', '-' and '_', not '{parts['name']}'")
    return parts


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
