"""What is taken from vLLM by name, and which of it a version lacks: said by name, before anything boots."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

TRIED = "0.32.0"
# A module, a name in it, and what of that is relied on: parameters of a function, attributes of a class.
Taken = tuple[tuple[str, str, tuple[str, ...]], ...]


def version() -> str:
    vllm: Any = import_module("vllm")
    return str(vllm.__version__)


def missing(taken: Taken) -> list[str]:
    """What this vLLM lacks of it, by name."""
    lacking = []
    for module, name, relied_on in taken:
        where = f"{module}.{name}"
        try:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            lacking.append(where)
            continue
        has = _names(found)
        lacking += [f"{where}'s {each}" for each in relied_on if each not in has]
    return lacking


def _names(found: Any) -> set[str]:
    """A function's parameters; or what a class, or its instances, have."""
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters)
    annotated = {name for each in found.__mro__ for name in getattr(each, "__annotations__", {})}
    return {*dir(found), *annotated}
