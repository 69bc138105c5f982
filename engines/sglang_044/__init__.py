"""SGLang 0.4.4 as an engine: its own scheduler, overlap worker and batch preparation, over a device that is a
clock (`--pace`). The first source of this project, SGLang's pull request 4790, is a change to that release.

How it is installed, what is its own and what is replaced: README.md.

    bench run --variant sglang044-copy-done --pace 10ms --set python=/venvs/sglang-044/bin/python

Importing this package costs milliseconds, and does not need SGLang.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang_044.toggles import sync
from overlap_bench.engines.sglang_base import declared

VERSION = "0.4.4"
REPLACED = (
    "the card: the driver of Triton and of CUDA graphs, the forward pass, sampled tokens, events, streams, "
    "blocking copies, FlashInfer's plan, weights, the KV cache's memory, and SGLang's detokenizer and HTTP "
    "server"
)

SPEC = declared(
    __name__,
    name="sglang-0.4",
    version=VERSION,
    summary="scheduler and overlap worker",
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
)
