"""Which of the two ways of batching an arm asks for."""

from __future__ import annotations

from engines.api import BadSetting, Engine, EngineOptions
from engines.transformers import SPEC


def build(options: EngineOptions, toggles: dict[str, str]) -> Engine:
    """What the host calls (api.EngineSpec.build)."""
    if options.sampling:
        raise BadSetting("engine transformers decodes greedily: leave --temperature at 0")
    toggles = SPEC.check(toggles)
    if toggles["batching"] == "static":
        from engines.transformers.static import StaticEngine

        return StaticEngine(options, toggles)

    from engines.transformers.continuous import ContinuousEngine

    return ContinuousEngine(options, toggles)
