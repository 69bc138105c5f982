"""prefill: whether a prefill is launched before the results of a prefill just before it are processed.

Before (`overlap`): prefills are steps like any other, so the first one's tokens are sent only when the second
one is launched. After (`consecutive-sync`): where two follow each other, the first one's tokens are waited
for and processed, then the second one is launched. All other steps overlap as before.

Claim: SGLang 11856, P99 TTFT 425.50 -> 335.07 ms (-21%), P99 ITL +1.5%, mean latency and throughput
unchanged (80B on 8 H20, prompts of 3500 tokens). 26226 makes it the default there: TTFT 3.97 -> 2.83 s (397B
on 8 H200, 5 output tokens, one run a side).

What can go wrong: between the two prefills the device stands still for as long as the first one's processing
takes. The gain is the host time of one launch, so where a launch is cheap there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.overlap.loop import Loop
    from overlap_bench.engines.overlap.step import Step

TOGGLE = Toggle(
    name="prefill",
    module=__name__,
    choices=("overlap", "consecutive-sync"),
    changes="of two prefills in a row, whether the second is launched before or after the first one's "
    "results are processed",
    source="SGLang 11856, 26226",
    requires={"*": {"schedule": ("overlap",)}},  # serial always processes first
    counters=("consecutive_prefills", "prefill_processing_ns"),
)


def overlap(loop: Loop, previous: Step | None, current: Step | None) -> Step | None:
    """Before."""
    if in_a_row(previous, current):
        loop.counters["consecutive_prefills"] += 1
    return previous


def consecutive_sync(loop: Loop, previous: Step | None, current: Step | None) -> Step | None:
    """After."""
    if previous is None or not in_a_row(previous, current):
        return previous
    ids = loop.wait_copy_done(previous)
    began = perf_counter_ns()  # from here on the device has nothing to do
    loop.process(previous, ids)
    loop.counters["prefill_processing_ns"] += perf_counter_ns() - began
    loop.counters["consecutive_prefills"] += 1
    return None


def in_a_row(previous: Step | None, current: Step | None) -> bool:
    return (
        previous is not None
        and current is not None
        and previous.batch.program.kind == "prefill"
        and current.batch.program.kind == "prefill"
    )


# Called when `current` is scheduled but not launched; returns the step to process after that launch, if any.
POLICIES: dict[str, Callable[[Loop, Step | None, Step | None], Step | None]] = {
    "overlap": overlap,
    "consecutive-sync": consecutive_sync,
}
