"""empty_blocks: what a request gets that needs no new block in a step.

Before (`new`), as our rewriting of what vLLM 24964 says it replaced: an object of its own, for each request
that a step schedules. After (`installed`), vLLM's own hands out one that all share.

Claim: vLLM 24964, fewer objects for the collector; none in numbers. Of 16 decode steps, a request needs a new
block in one.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import INSTALLED, Change


def put_new() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

    def new(manager: Any, blocks: Any) -> Any:
        return KVCacheBlocks(blocks)

    KVCacheManager.create_kv_cache_blocks = new


def shown(scheduler: Any) -> str:
    made_by = type(scheduler.kv_cache_manager).create_kv_cache_blocks
    return "new" if made_by.__module__ == __name__ else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="empty_blocks",
        module=__name__,
        choices=("new", INSTALLED),
        changes="whether a request that needs no new block gets an object of its own, or one that all share",
        source="vLLM 24964",
        rewritten="new",
        optional=True,
    ),
    needs=(
        (
            "vllm.v1.core.kv_cache_manager",
            "KVCacheManager.create_kv_cache_blocks",
            ("blocks",),
        ),
        ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("blocks",)),
    ),
    put={"new": put_new},
    shown=shown,
    instead={"slots": "decode-path"},
)
