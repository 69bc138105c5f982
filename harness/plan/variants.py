"""The named before/after pairs of engines/variants.toml."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import msgspec

from engines import api


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim made testable: two full settings of one engine and the workload that exposes the effect."""

    name: str
    title: str
    engine: str
    source: str  # where the claim comes from
    claim: str  # what was claimed, in the source's numbers
    changes: list[str]  # the toggles that differ
    before: dict[str, str]  # toggle: choice
    after: dict[str, str]
    workload: dict[str, str | int | float | bool | None] = {}
    options: dict[str, str | int | float | bool | None] = {}  # of the engine, for both arms
    primary: str = ""  # the metric that decides, unless --primary names another; "": the usual one
    secondaries: list[str] = []  # metrics that get a verdict too, unless --secondary names others
    expect: dict[str, str] = {}  # what to expect, by device


def load_variants() -> dict[str, Variant]:
    """Every named variant, in the order of the file. Raises BadFile where the file can't be understood."""
    try:
        tables = tomllib.loads(files("engines").joinpath("variants.toml").read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise api.BadFile(f"engines/variants.toml can't be read: {error}") from error
    return {name: _variant(name, table) for name, table in tables.items()}


def _variant(name: str, table: Any) -> Variant:
    if not isinstance(table, dict):
        raise api.BadFile(f"engines/variants.toml: '{name}' stands outside of a table [NAME]")
    try:
        return msgspec.convert({"name": name, **table}, type=Variant)
    except msgspec.ValidationError as error:
        needed = [field.name for field in msgspec.structs.fields(Variant) if field.required]
        lacking = [each for each in needed[1:] if each not in table]
        why = f"it lacks {', '.join(lacking)}" if lacking else str(error)
        raise api.BadFile(f"engines/variants.toml, [{name}]: {why}") from error
