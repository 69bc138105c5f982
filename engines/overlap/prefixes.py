"""The prefix cache as requests see it: which kept blocks one begins with, and which of its own are kept."""

from __future__ import annotations

from overlap_bench.engines.overlap.kv_cache import NO_KEY, BlockPool, block_key
from overlap_bench.engines.overlap.request import Active


def cached_prefix(pool: BlockPool, request: Active) -> list[int]:
    """The kept blocks that hold its leading tokens, at most up to the one before its last."""
    full = (request.context - 1) // pool.block_size
    _extend_keys(pool, request, full)
    return pool.find(request.keys[:full])


def keep_full_blocks(pool: BlockPool, request: Active) -> None:
    """Keep those whose ids are all on the host and were fed to a finished step: all but the newest id."""
    full = (request.known - 1) // pool.block_size
    if full > request.kept_blocks:
        _extend_keys(pool, request, full)
        for place in range(request.kept_blocks, full):
            pool.keep(request.blocks[place], request.keys[place])
        request.kept_blocks = full


def _extend_keys(pool: BlockPool, request: Active, count: int) -> None:
    """Keys for its first `count` blocks."""
    keys, size = request.keys, pool.block_size
    if len(keys) < count:
        ids = request.prompt + request.tokens
        for place in range(len(keys), count):
            keys.append(block_key(keys[-1] if keys else NO_KEY, ids[place * size : (place + 1) * size]))
