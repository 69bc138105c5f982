"""The overlap engine: a small real engine in which each overlap optimization is a toggle.

Importing this package costs milliseconds, so that a command line can list and check toggles.
"""

from overlap_bench.engines.api import EngineSpec, Setting
from overlap_bench.engines.overlap import toggles
from overlap_bench.engines.presets import PRESETS

TOGGLES = {each.TOGGLE.name: each for each in toggles.found()}

SPEC = EngineSpec(
    name="overlap",
    summary="the built-in engine: continuous batching, paged KV cache, every optimization a toggle",
    toggles=tuple(each.TOGGLE for each in TOGGLES.values()),
    settings=(Setting("ranks", "devices that one model spans, each with a part of its weights (1)"),),
    build=f"{__name__}.engine:build",
    packages=("overlap_bench.engines",),
    plants=("device", "host"),
    # The last two only where the settings have them: output=process, and tokenize_workers.
    phases=(
        *("recv", "schedule", "metadata", "h2d", "launch", "append", "output"),
        *("output-process", "tokenize"),
    ),
    scores=True,
    samples=True,
    takes_turns=True,
    overlapping={name: each.OVERLAPPING for name, each in TOGGLES.items() if hasattr(each, "OVERLAPPING")},
    eager={name: each.EAGER for name, each in TOGGLES.items() if hasattr(each, "EAGER")},
    composing=tuple(name for name, each in TOGGLES.items() if getattr(each, "COMPOSING", False)),
    paced={"model": "micro-gpt2", "device": "emulated"},  # which computes well before its time is up
    presets=tuple(PRESETS),
)
