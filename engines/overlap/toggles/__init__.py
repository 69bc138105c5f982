"""The toggles of the engine, a file each: a file that is put here is one.

It has a `TOGGLE`, and its choices side by side. `SERVING`, where it has one, is a context manager for each
choice, entered while the engine serves: it is given the Loop, and may put something else in the place of any
of its parts. What a part is made with, at boot, stands in assembly.py.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

# Each means something with those before it, or nothing; all others come behind them.
FIRST = (
    *("schedule", "launch", "sync", "h2d", "d2h", "output", "graph", "tables", "prefill", "chunk", "steps"),
    *("spec", "accept", "gil", "gc", "share"),
)


def found() -> list[ModuleType]:
    """Every toggle's module."""
    names = {each.name for each in iter_modules(__path__)}
    known = [name for name in FIRST if name in names]
    return [import_module(f"{__name__}.{name}") for name in (*known, *sorted(names.difference(FIRST)))]
