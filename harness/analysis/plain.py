"""A result as plain values: what --format json prints, what is stored, and an older file read back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from overlap_bench.harness.analysis import arm_warnings, decision  # noqa: F401  (whose kinds are read)
from overlap_bench.harness.analysis import warnings as warnings_
from overlap_bench.harness.analysis.result import TAG
from overlap_bench.harness.common.names import sentence_of_today
from overlap_bench.harness.store.files import SCHEMA_VERSION

Found = TypeVar("Found", bound=msgspec.Struct)
# Of what an older result calls them.
KEYS = {
    "blocks": "trials",
    "more_blocks": "more_trials",
    "seconds_per_block": "seconds_per_trial",
    "sliced": "interleaved",
}


def to_plain(found: msgspec.Struct) -> dict[str, Any]:
    """The object of --format json, below its headline and verdict: the struct field by field, warnings as
    their sentences."""
    plain: dict[str, Any] = _plain(msgspec.to_builtins(found), lambda told: warnings_.of_fields(told).text)
    for each in (plain, *plain.get("comparisons", ())):
        if "metrics" in each:  # of a comparison, whose rows have the words
            each.pop("verdict", None)
    return plain


def to_stored(found: msgspec.Struct) -> dict[str, Any]:
    """The object of summary.json: the same, with the fields of each warning."""
    plain: dict[str, Any] = _plain(msgspec.to_builtins(found), warnings_.stored)
    return plain


def _plain(value: Any, of_warning: Callable[[dict[str, Any]], Any]) -> Any:
    match value:
        case {warnings_.TAG: str()}:
            return of_warning(value)
        case dict():
            return {name: _plain(each, of_warning) for name, each in value.items() if name != TAG}
        case list():
            return [_plain(each, of_warning) for each in value]
    return value


def from_plain(plain: dict[str, Any], kind: type[Found]) -> Found:
    """What is stored as a struct again, by the names of today; of an older file's warnings, which are
    sentences, none has a known severity. Raises msgspec.ValidationError."""
    return msgspec.convert(_with_structs(plain), kind, dec_hook=lambda _, told: warnings_.read(told))


def _with_structs(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_with_structs(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    named = {str(name): _as_struct(name, value) for name, value in plain.items()}
    found: dict[str, Any] = {KEYS.get(name, name): value for name, value in named.items()}
    if {"primary", "metrics", "margin", "after"} <= found.keys() and "verdict" not in found:
        with suppress(KeyError, TypeError, AttributeError):  # of a damaged one: it is refused as it is
            found["verdict"] = decision.of_older(found)
    return found


def _as_struct(name: str, value: Any) -> Any:
    match name, value:
        case "warnings", list():
            return [sentence_of_today(each) if isinstance(each, str) else each for each in value]
        case "prediction", dict():
            tag = "NoPrediction" if "none" in value else "Prediction"
            return {TAG: tag, **_with_structs(value)}
        case ("unit", "block"):
            return "trial"
        case ("schema_version", 1):  # whose names are today's from here on
            return SCHEMA_VERSION
        case (("notes" | "faults" | "doubts" | "extents"), list()) if all(
            isinstance(each, str) for each in value
        ):
            return list(map(sentence_of_today, value))
        case (("conclusion" | "headline" | "stopped_because" | "remark" | "none"), str()):
            return sentence_of_today(value)
    return _with_structs(value)
