"""What both releases of SGLang that are engines here share: how they are declared, the way in of a request,
the way out of its tokens, the scheduler's records, and the card that is a clock. Importing this needs no
SGLang.
"""

from __future__ import annotations

from overlap_bench.engines.api import EngineSpec, Toggle
from overlap_bench.engines.presets import PRESETS, SHAPES

GIL = "BENCH_SGLANG_GIL"  # "held": driver calls hold it, as no driver does, to show what that changes
PACED = {"model": "llama3-8b", "dtype": "bfloat16", "max_context": 2048}


def declared(package: str, name: str, version: str, summary: str, toggles: tuple[Toggle, ...]) -> EngineSpec:
    """A release of SGLang as an engine."""
    return EngineSpec(
        name=name,
        summary=f"SGLang {version}'s own {summary}, on a device that is a clock (--pace)",
        toggles=toggles,
        build=f"{package}.engine:build",
        presets=(*PRESETS, *SHAPES),
        # As released: a chunk per token, prompts in parts of 8192.
        defaults={**PACED, "stream_interval": 1, "prefill_max_tokens": 8192},
        paced=PACED,
        plants=("host",),
        phases=("schedule", "metadata", "launch", "append", "output"),
        takes_turns=True,
        turn_steps=8,  # the first two of a turn fill the pipeline, and count for nothing
        overlapping={"schedule": ("overlap",)},
        preflight=True,
        packages=("sglang",),
        needs=f"sglang {version} in the arm's interpreter: --set python=PATH; and --pace",
    )
