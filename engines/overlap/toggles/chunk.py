"""chunk: whether a long prompt holds up the requests that decode.

Before (`off`): prompts go first, whole, in steps of their own; whoever decodes waits for all of it. After
(`on`): every step decodes, and beside it takes as much of the waiting prompts as its budget allows
(chunk_tokens); a longer one is continued in the next step.

Claims: chunked prefill is in every engine (Sarathi-Serve, OSDI 2024; vLLM 3236). vLLM 45074: its metadata,
larger than a decode step's, copied from pageable memory waited for the whole stream: 67 to 101 ms of a step
of 4,096 tokens gone with pinned memory.

What can go wrong: a prompt that is not whole yet has no token to give: what its row samples must reach
nobody (Batch.given). Its own next chunk reads what the one before it wrote, so chunks stay in order. A prompt
alone on the device is prefilled more slowly than whole: that is the price of everybody else's ITL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.batch import Batch
    from overlap_bench.engines.overlap.scheduler import Scheduler

TOGGLE = Toggle(
    name="chunk",
    module=__name__,
    choices=("off", "on"),
    changes="whether prompts are prefilled whole, in steps of their own, or in chunks beside decoding rows",
    source="Sarathi-Serve; vLLM 3236, 45074",
    counters=("prompt_chunks",),
)
COMPOSING = True  # it changes what a step is made of, so that arms that differ by it have unlike steps


def whole(scheduler: Scheduler) -> Batch | None:
    """Before."""
    return scheduler.prefill() or scheduler.decode(scheduler.grow())


def in_chunks(scheduler: Scheduler) -> Batch | None:
    """After."""
    decoding = scheduler.grow()
    if decoding is None:
        return None
    chunks = scheduler.take_chunks()
    return scheduler.mix(decoding, chunks) if chunks else scheduler.decode(decoding)


MIXES = {"off": False, "on": True}  # whether there are programs for both kinds of rows
COMPOSE: dict[str, Callable[[Scheduler], Batch | None]] = {"off": whole, "on": in_chunks}
