"""How one of vLLM's argued changes is switched. Importing this costs milliseconds, and does not need vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.fits import Taken

Put = Callable[[], None]
PUT = "BENCH_VLLM_TOGGLES"  # in the environment of each process of an engine: "block_map=nested"
INSTALLED = "installed"  # the choice that leaves vLLM as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A toggle and all that its choices ask of vLLM. `variables`, `arguments` and `sampling` are vLLM's own
    flags, by choice; `put` is done as each process of vLLM's loads its plugins, before it makes anything."""

    toggle: Toggle
    needs: Taken = ()  # of vLLM, for any choice but INSTALLED
    # For our own side: functions of vLLM that it does the same as, "module:name", by digest (fits.digest).
    like: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)  # by choice, one that vLLM does not bring
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    put: Mapping[str, Put] = field(default_factory=dict)
    # The choice that is in force: asked in the process of vLLM's core, with its scheduler, at its first
    # request; or in the one that its outputs are processed in, with None, at the first output. None: it shows
    # in each output.
    shown: Callable[[Any], str] | None = None
    in_core: bool = True
    # With a prefix cache, or without one, that both choices are the same without; None: either way.
    prefix_cache: bool | None = None
    instead: Mapping[str, str] = field(default_factory=dict)  # choices of others that do this one's work
