"""The named before/after pairs of engines/variants.toml.

The table [base] holds settings by name, which may build on a `base` themselves. A variant names the one that
both its arms start from, and what `before` and `after` set anew. The table [unmeasured] holds claims by name
that have no variant yet.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec

from overlap_bench.engines import api

FILE = "engines/variants.toml"
BASE, UNMEASURED = "base", "unmeasured"  # its tables that are no variants
Bases = Mapping[str, Mapping[str, str]]  # by name, then by toggle


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim made testable: two settings of one engine and the workload that exposes the effect."""

    name: str
    title: str
    source: str  # where the claim comes from
    claim: str  # what was claimed, in the source's numbers
    claimed: list[str] = []  # the metrics that these are of
    engine: str = "overlap"
    base: str = ""  # of the table [base]; `before` and `after` hold it once the file is read
    before: dict[str, str] = {}  # toggle: choice
    after: dict[str, str] = {}
    workload: dict[str, str | int | float | bool | None] = {}
    options: dict[str, str | int | float | bool | None] = {}  # of the engine, for both arms
    # Of one arm alone, where the change is an option and no toggle.
    before_options: dict[str, str | int | float | bool | None] = {}
    after_options: dict[str, str | int | float | bool | None] = {}
    primary: str = ""  # the metric that decides, unless --primary names another; "": the usual one
    secondaries: list[str] = []  # metrics that get a verdict too, unless --secondary names others
    phase: str = ""  # of a step, that the change is said to shorten: judged by itself, too
    expect: dict[str, str] = {}  # what to expect, by device

    @property
    def changes(self) -> list[str]:
        """The toggles that differ."""
        names = {**self.after, **self.before}
        return [name for name in names if self.after.get(name) != self.before.get(name)]


class Unmeasured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim without a variant, and what it would take to measure it."""

    title: str
    source: str
    claim: str
    needs: str


def load_variants() -> dict[str, Variant]:
    """Every named variant, in the order of the file. Raises BadFile where the file can't be understood."""
    tables = _tables()
    try:
        bases = msgspec.convert(tables.pop(BASE, {}), type=dict[str, dict[str, str]])
    except msgspec.ValidationError as error:
        raise api.BadFile(f'{FILE}: [base] holds NAME = {{ toggle = "choice" }}: {error}') from error
    return {name: _variant(name, table, bases) for name, table in tables.items() if name != UNMEASURED}


def load_unmeasured() -> dict[str, Unmeasured]:
    """The claims that no variant measures, in the order of the file. Raises BadFile, also where there is such
    a variant."""
    tables = _tables()
    try:
        found = msgspec.convert(tables.get(UNMEASURED, {}), type=dict[str, Unmeasured])
    except msgspec.ValidationError as error:
        raise api.BadFile(f"{FILE}, [{UNMEASURED}]: {error}") from error
    for name in found:
        if name in tables:
            raise api.BadFile(f"{FILE}, [{UNMEASURED}]: '{name}' is a variant, so it can be measured")
    return found


def _tables() -> dict[str, Any]:
    try:
        return tomllib.loads(files("overlap_bench.engines").joinpath("variants.toml").read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise api.BadFile(f"{FILE} can't be read: {error}") from error


def _variant(name: str, table: Any, bases: Bases) -> Variant:
    if not isinstance(table, dict):
        raise api.BadFile(f"{FILE}: '{name}' stands outside of a table [NAME]")
    try:
        written = msgspec.convert({"name": name, **table}, type=Variant)
    except msgspec.ValidationError as error:
        needed = [field.name for field in msgspec.structs.fields(Variant) if field.required]
        lacking = [each for each in needed[1:] if each not in table]
        why = f"it lacks {', '.join(lacking)}" if lacking else str(error)
        raise api.BadFile(f"{FILE}, [{name}]: {why}") from error
    try:
        common = _settings(written.base, bases) if written.base else {}
    except api.BadSetting as error:
        raise api.BadFile(f"{FILE}, [{name}]: {error}") from error
    return msgspec.structs.replace(
        written, before={**common, **written.before}, after={**common, **written.after}
    )


def _settings(base: str, bases: Bases, above: tuple[str, ...] = ()) -> dict[str, str]:
    """All that a base sets, its own over that of its base."""
    if base in above:
        raise api.BadSetting(f"its bases go in a circle: {' -> '.join((*above, base))}")
    own = dict(api.pick(base, bases, "base"))
    under = own.pop("base", None)
    return own if under is None else {**_settings(under, bases, (*above, base)), **own}


def measured_by(
    variants: Mapping[str, Variant],
    engine: str,
    before: Mapping[str, str],
    after: Mapping[str, str],
    options: tuple[Mapping[str, object], Mapping[str, object]] = ({}, {}),
) -> Variant | None:
    """The variant whose change two arms make, by their toggles and their `options`, whatever else both have;
    of several, the one whose other settings are nearest: output moves to a process in a serial loop and under
    overlap."""
    changed = _changes(before, after), _changes(*options)
    if not any(changed):
        return None

    def shared(variant: Variant) -> int:
        return sum(before.get(name) == choice for name, choice in variant.before.items())

    found = [
        each
        for each in variants.values()
        if each.engine == engine
        and (_changes(each.before, each.after), _changes(each.before_options, each.after_options)) == changed
    ]
    return max(found, key=shared, default=None)


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: (before.get(name, ""), after.get(name, "")) for name in names}
