"""gc: whether the collector walks what was made before the first request.

Before (`default`): imports, tokenizer and buffers stay in the collector's oldest generation, and a full
collection walks them all. After (`frozen`): collected once, then frozen before the loop, out of the
collector's sight. The collector stays on: what serving makes is collected as ever.

Claim: SGLang 9241, which saw stalls of 100 to 300 ms every 1.5 s or so, from collections of the oldest
generation; it gives no before and after.

What can go wrong: a cycle among frozen objects is never collected, so they are unfrozen when serving ends.
An engine that makes little garbage has few full collections, and little to gain.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any

from overlap_bench.engines.api import Toggle

TOGGLE = Toggle(
    name="gc",
    module=__name__,
    choices=("default", "frozen"),
    changes="whether the garbage collector scans what was made before the first request, or it is frozen",
    source="SGLang 9241; roseinfer",
    counters=("gc_collections", "gc_full_collections", "gc_ns"),
)

OLDEST = 2  # the generation whose collection walks everything that is not frozen


@contextmanager
def freeze(loop: object = None) -> Iterator[None]:
    """After."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def counted(counters: dict[str, int]) -> Iterator[None]:
    """Count collections and their time, at 1 us each. They never nest, so one stamp serves all threads."""
    began = 0

    def collecting(phase: str, info: dict[str, Any]) -> None:
        nonlocal began
        if phase == "start":
            began = perf_counter_ns()
            return
        counters["gc_ns"] += perf_counter_ns() - began
        counters["gc_collections"] += 1
        counters["gc_full_collections"] += info["generation"] == OLDEST

    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)


SERVING: dict[str, Callable[..., AbstractContextManager[None]]] = {"default": nullcontext, "frozen": freeze}
