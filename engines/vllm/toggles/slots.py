"""slots: what the scheduler asks for a decode's next token, where its last block has room for it.

Before (`installed`), vLLM's allocate_slots, as for any chunk of a prompt: what is outside of a window, what
has to be cached, how many blocks it takes, which are free. After (`decode-path`), as our rewriting of the
early return of vLLM 29206: nothing, where full attention alone keeps blocks and no prefix cache wants them.

Claim: vLLM 29206 (closed), 171.5 -> 165.9 s with async scheduling (opt-125m, batch 3,000), where
allocate_slots went from 17.2% to 8.2% of the run. Of 16 tokens of a request, 15 have room in its last block.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import INSTALLED, Change

MANAGER = "vllm.v1.core.kv_cache_manager"
SIZE = "bench_block_size"  # of a manager, once it is known; 0 where blocks are not that simple


def block_size(manager: Any) -> int:
    """The tokens of a block, where full attention has all blocks and nothing is cached; else 0."""
    groups = manager.kv_cache_config.kv_cache_groups
    if manager.enable_caching or len(groups) != 1:
        return 0
    spec = groups[0].kv_cache_spec
    full = type(spec).__name__ == "FullAttentionSpec" and getattr(spec, "sliding_window", None) is None
    return int(spec.block_size) if full else 0


def has_room(manager: Any, request: Any, tokens: int, named: dict[str, Any]) -> bool:
    """Whether the last block of a request that runs takes one more token."""
    if tokens != 1 or named != {"num_lookahead_tokens": 0}:  # what is asked for one that waits names more
        return False
    size = manager.__dict__.get(SIZE)
    if size is None:
        size = manager.__dict__[SIZE] = block_size(manager)
    return bool(size and request.num_computed_tokens % size)


def put_decode_path() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    installed = KVCacheManager.allocate_slots

    def decode_path(manager: Any, request: Any, num_new_tokens: int, *given: Any, **named: Any) -> Any:
        if not given and has_room(manager, request, num_new_tokens, named):
            return manager.empty_kv_cache_blocks
        return installed(manager, request, num_new_tokens, *given, **named)

    KVCacheManager.allocate_slots = decode_path


def shown(scheduler: Any) -> str:
    """With other kinds of blocks, or drafts, vLLM's own is asked each time, whatever was put in its place."""
    manager = scheduler.kv_cache_manager
    takes = type(manager).allocate_slots.__module__ == __name__ and block_size(manager)
    drafts = scheduler.vllm_config.speculative_config is not None
    return "decode-path" if takes and not drafts else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="slots",
        module=__name__,
        choices=(INSTALLED, "decode-path"),
        changes="whether a decode whose last block has room asks the KV cache's manager for a block",
        source="vLLM 29206",
        rewritten="decode-path",
        optional=True,
    ),
    needs=(
        (MANAGER, "KVCacheManager.allocate_slots", ("request", "num_new_tokens", "num_lookahead_tokens")),
        ("vllm.v1.kv_cache_interface", "FullAttentionSpec", ("block_size",)),
        ("vllm.v1.request", "Request", ("num_tokens",)),
    ),
    like={f"{MANAGER}:KVCacheManager.allocate_slots": "01376c8a60247d7c"},
    put={"decode-path": put_decode_path},
    shown=shown,
    prefix_cache=False,
)
