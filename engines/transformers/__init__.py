"""Hugging Face transformers as an engine: the library's own generation, behind the protocol of the others.

`batching=static` is generate(): a batch is formed, runs until its last request ends, and whoever comes
meanwhile waits for the next one. `batching=continuous` is what generate_batch() runs on: requests join and
leave between two steps. Both decode greedily. Importing this package costs milliseconds.
"""

from __future__ import annotations

from overlap_bench.engines.api import EngineSpec, Toggle
from overlap_bench.engines.presets import PRESETS

SPEC = EngineSpec(
    name="transformers",
    summary="Hugging Face transformers: generate() in static batches, or its continuous batching; greedy",
    toggles=(
        Toggle(
            name="batching",
            choices=("static", "continuous"),
            changes="whether requests wait for the batch before them to end, or join the running one",
            source="transformers: generate(), generate_batch()",
            counters=("steps", "idle_rows"),
        ),
        Toggle(
            name="async_batching",
            choices=("off", "on"),
            changes="whether a batch is prepared while the device works on the one before it; CUDA only",
            source="transformers: ContinuousBatchingConfig.use_async_batching",
            requires={"*": {"batching": ("continuous",)}},
        ),
        Toggle(
            name="cuda_graph",
            choices=("off", "on"),
            changes="eager launches, or captured steps of padded sizes; CUDA only",
            source="transformers: ContinuousBatchingConfig.use_cuda_graph",
            requires={"*": {"batching": ("continuous",)}},
        ),
    ),
    build=f"{__name__}.engine:build",
    presets=tuple(PRESETS),
    packages=("transformers",),
    device_holds=None,
)
