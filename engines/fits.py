"""What our code hangs on in another's package: names, and functions that a side of ours stands in for."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

# A module, a name in it, and what of that is relied on: parameters of a function, attributes of a class.
Taken = tuple[tuple[str, str, tuple[str, ...]], ...]


def missing(taken: Taken) -> list[str]:
    """What is lacking of it, by name."""
    lacking = []
    for module, name, relied_on in taken:
        where = f"{module}.{name}"
        try:
            found = _found(module, name)
        except (ImportError, AttributeError):
            lacking.append(where)
            continue
        has = _names(found)
        lacking += [f"{where}'s {each}" for each in relied_on if each not in has]
    return lacking


def differing(like: Mapping[str, str]) -> list[str]:
    """Which of these functions, "module:name", read otherwise than as our own side of them was written.
    `like`: the digest of each as it was then. One that is not there is another one, too."""
    return [each for each, known in like.items() if digest(*each.split(":")) != known]


def digest(module: str, name: str) -> str:
    """Digest of a function's lines, without how far they are indented; "" where it has none."""
    try:
        lines = inspect.getsource(_found(module, name)).splitlines()
    except (ImportError, AttributeError, TypeError, OSError):
        return ""
    text = "\n".join(line.strip() for line in lines if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _found(module: str, name: str) -> Any:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _names(found: Any) -> set[str]:
    """A function's parameters; or what a class, or its instances, have."""
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters)
    annotated = {name for each in found.__mro__ for name in getattr(each, "__annotations__", {})}
    return {*dir(found), *annotated}
