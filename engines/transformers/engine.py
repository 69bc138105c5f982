"""Which of the two ways of batching an arm asks for."""

from __future__ import annotations

from overlap_bench.engines.api import BadSetting, Engine, EngineOptions
from overlap_bench.engines.transformers import SPEC


def build(options: EngineOptions, toggles: dict[str, str]) -> Engine:
    """What the host calls (api.EngineSpec.build)."""
    if options.sampling:
        raise BadSetting("engine transformers decodes greedily: leave --temperature at 0")
    toggles = SPEC.check(toggles)
    if toggles["batching"] == "static":
        from overlap_bench.engines.transformers.static import StaticEngine

        return StaticEngine(options, toggles)

    from overlap_bench.engines.transformers.continuous import ContinuousEngine

    return ContinuousEngine(options, toggles)
