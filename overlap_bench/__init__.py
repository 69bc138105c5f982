"""overlap-bench for programs: what an engine of yours is made of, and the results of a run.

    from overlap_bench import Engine, EngineSpec, Toggle  # and all else of overlap_bench.engines.api
    from overlap_bench import compare, load, load_sensitivity, load_sweep, plots  # of overlap_bench.harness

A name is imported when it is first asked for: the process that an engine runs in may lack pandas, and an
engine needs nothing but the contract.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_bench.engines.api import *  # noqa: F403
    from overlap_bench.harness import compare, load, load_sensitivity, load_sweep, plots  # noqa: F401

RESULTS = ("compare", "load", "load_sensitivity", "load_sweep", "plots")


def __dir__() -> list[str]:
    return [*import_module("overlap_bench.engines.api").__all__, *RESULTS]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        place = import_module("overlap_bench.harness" if name in RESULTS else "overlap_bench.engines.api")
        if name not in place.__all__:
            raise AttributeError(f"module 'overlap_bench' has no attribute {name!r}")
        globals()[name] = getattr(place, name)  # an engine's step may ask for it
        return globals()[name]
