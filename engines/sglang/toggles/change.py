"""How one of SGLang's argued changes is switched. Importing this does not need SGLang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlap_bench.engines.api import Toggle

INSTALLED = "installed"  # the choice that leaves SGLang as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A toggle and all that its choices ask of SGLang. `variables` are SGLang's own flags, by choice;
    `put` is done once SGLang is imported, before its scheduler is made."""

    toggle: Toggle
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    put: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    # For our own side: functions of SGLang that it is put into, "module:name", by digest (fits.digest).
    like: Mapping[str, str] = field(default_factory=dict)
    # The choice that is in force, by SGLang's scheduler and what its first step gave.
    shown: Callable[[Any, Any], str]
