"""heap: whether the collector walks over what the core made as it booted.

Before (`collected`), it does, whenever it collects its oldest generation. After (`frozen`), the core has
called gc.freeze() at the end of its boot, and only what came later is walked over.

Claim: vLLM 24008, shorter pauses of the oldest generation; its author had not benched it, and another
reported "a non-negligible improvement" (a part was taken back by 44363; the stalls of 48229 did not come back
on other hosts). The before undoes it by gc.unfreeze(), which is Python's own. Collections of the oldest
generation are rare: a mean of steps shows them, a trimmed one less.
"""

from __future__ import annotations

import gc

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change


def put_collected() -> None:
    from vllm.v1.engine import core

    freeze = core.freeze_gc_heap

    def undone() -> None:
        freeze()  # it collects first, which both sides do
        gc.unfreeze()

    core.freeze_gc_heap = undone


CHANGE = Change(
    toggle=Toggle(
        name="heap",
        module=__name__,
        choices=("collected", "frozen"),
        changes="whether the garbage collector walks over what the core made as it booted",
        source="vLLM 24008, 44363, 48229",
        optional=True,
    ),
    needs=(("vllm.v1.engine.core", "freeze_gc_heap", ()),),
    put={"collected": put_collected},
    shown=lambda scheduler: "frozen" if gc.get_freeze_count() else "collected",
)
