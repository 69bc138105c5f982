"""SGLang of today as an engine: its own event loops and batch preparation, over a device that is a clock
(`--pace`).

How it is installed, what is its own and what is replaced: README.md.

    bench run --variant sglang-overlap --pace 10ms --set python=/venvs/sglang/bin/python

Importing this package costs milliseconds, and does not need SGLang.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.sglang.toggles import CHANGES
from overlap_bench.engines.sglang_base import declared

VERSION = "0.5.23"
REPLACED = (
    "the card: the driver of Triton and of CUDA graphs, the forward pass, sampled tokens, events, streams, "
    "weights, the KV cache's memory, and SGLang's tokenizer's, detokenizer's and HTTP server's processes"
)

SPEC = declared(
    __name__,
    name="sglang",
    version=VERSION,
    summary="scheduler",
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
)
