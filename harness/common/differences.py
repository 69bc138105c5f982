"""Where two plain values differ, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from overlap_bench.harness.common.names import FIELDS

TOLD = 4  # differences, in a line


def difference(old: Any, new: Any, path: str = "") -> str:
    """Where two plain values differ: "arms.0.toggles.h2d was 'pinned', is 'packed'; ...", the first ones and
    how many there are besides; "" where they are equal."""
    found = list(_differences(old, new, path))
    more = [f"and {len(found) - TOLD} more"] if len(found) > TOLD else []
    return "; ".join(found[:TOLD] + more)


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(each for each in new if each not in old)]:
            shown = FIELDS.get(str(key), str(key))
            yield from _differences(old.get(key), new.get(key), f"{path}.{shown}" if path else shown)
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(left, right, f"{path}.{index}")
    else:
        yield f"{path} was {old!r}, is {new!r}"
