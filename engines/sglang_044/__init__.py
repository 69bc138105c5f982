"""SGLang 0.4.4 as an engine: its own scheduler, overlap worker and batch preparation, over a device that is a
clock (`--pace`). The first source of this project, SGLang's pull request 4790, is a change to that release.

How it is installed, what is its own and what is replaced: README.md.

    bench run --variant sglang044-copy-done --pace 10ms --set python=/venvs/sglang-044/bin/python

Importing this package costs milliseconds, and does not need SGLang.
"""

from __future__ import annotations

from overlap_bench.engines.api import EngineSpec, Toggle
from overlap_bench.engines.presets import PRESETS, SHAPES
from overlap_bench.engines.sglang_044.toggles import sync

VERSION = "0.4.4"
REPLACED = (
    "the card: the driver of Triton and of CUDA graphs, the forward pass, sampled tokens, events, streams, "
    "blocking copies, FlashInfer's plan, weights, the KV cache's memory, and SGLang's detokenizer and HTTP "
    "server"
)
PACED = {"model": "llama3-8b", "dtype": "bfloat16", "max_context": 2048}

SPEC = EngineSpec(
    name="sglang-0.4",
    summary=f"SGLang {VERSION}'s own scheduler and overlap worker, on a device that is a clock (--pace)",
    toggles=(
        Toggle(
            name="schedule",
            choices=("normal", "overlap"),
            changes="SGLang's event_loop_normal, or its event_loop_overlap with a forward thread",
            source="SGLang --disable-overlap-schedule is the before",
        ),
        sync.TOGGLE,
        Toggle(
            name="attention",
            choices=("flashinfer", "triton"),
            changes="whose planning a decode step waits for: FlashInfer's reads lengths back from the card, "
            "so a step is launched once the one before it has ended; Triton's reads nothing",
            source="SGLang --attention-backend",
        ),
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
