"""The overlap engine: a small real engine in which each overlap optimization is a toggle.

Importing this package costs milliseconds, so that a command line can list and check toggles.
"""

from overlap_bench.engines.api import EngineSpec, Setting
from overlap_bench.engines.overlap.toggles import (
    accept,
    chunk,
    d2h,
    gc,
    gil,
    graph,
    h2d,
    launch,
    output,
    prefill,
    schedule,
    share,
    spec,
    steps,
    sync,
    tables,
)
from overlap_bench.engines.presets import PRESETS

SPEC = EngineSpec(
    name="overlap",
    summary="the built-in engine: continuous batching, paged KV cache, every optimization a toggle",
    toggles=(
        schedule.TOGGLE,
        launch.TOGGLE,
        sync.TOGGLE,
        h2d.TOGGLE,
        d2h.TOGGLE,
        output.TOGGLE,
        graph.TOGGLE,
        tables.TOGGLE,
        prefill.TOGGLE,
        chunk.TOGGLE,
        steps.TOGGLE,
        spec.TOGGLE,
        accept.TOGGLE,
        gil.TOGGLE,
        gc.TOGGLE,
        share.TOGGLE,
    ),
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
    overlapping={"schedule": ("overlap",)},
    composing=("chunk", "steps", "spec"),
    paced={"model": "micro-gpt2", "device": "emulated"},  # which computes well before its time is up
    presets=tuple(PRESETS),
)
