"""The named before/after pairs of engines/variants.toml."""

from __future__ import annotations

import tomllib
from importlib.resources import files

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
    expect: dict[str, str] = {}  # what to expect, by device


def load_variants() -> dict[str, Variant]:
    """Every named variant, in the order of the file. Raises BadSetting where the file can't be understood."""
    try:
        text = files("engines").joinpath("variants.toml").read_text()
        tables = tomllib.loads(text)
        return {
            name: msgspec.convert({"name": name, **table}, type=Variant) for name, table in tables.items()
        }
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, TypeError) as error:
        raise api.BadSetting(f"engines/variants.toml can't be read: {error}") from error
