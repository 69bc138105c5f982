"""SGLang of today as an engine: its own event loops and batch preparation, over a device that is a clock
(`--pace`).

How it is installed, what is its own and what is replaced: README.md.

    bench run --variant sglang-overlap --pace 10ms --set python=/venvs/sglang/bin/python

Importing this package costs milliseconds, and does not need SGLang.
"""

from __future__ import annotations

from overlap_bench.engines.api import EngineSpec, Toggle
from overlap_bench.engines.presets import PRESETS, SHAPES
from overlap_bench.engines.sglang.toggles import CHANGES

VERSION = "0.5.23"
REPLACED = (
    "the card: the driver of Triton and of CUDA graphs, the forward pass, sampled tokens, events, streams, "
    "weights, the KV cache's memory, and SGLang's tokenizer's, detokenizer's and HTTP server's processes"
)
PACED = {"model": "llama3-8b", "dtype": "bfloat16", "max_context": 2048}

SPEC = EngineSpec(
    name="sglang",
    summary=f"SGLang {VERSION}'s own scheduler, on a device that is a clock (--pace)",
    toggles=(
        Toggle(
            name="schedule",
            choices=("normal", "overlap"),
            changes="SGLang's event_loop_normal, or its event_loop_overlap, which launches a step before it "
            "processes the one before",
            source="SGLang --disable-overlap-schedule is the before",
        ),
        *(each.toggle for each in CHANGES),
    ),
    build=f"{__name__}.engine:build",
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
    needs=f"sglang {VERSION} in the arm's interpreter: --set python=PATH; and --pace",
)
