"""block_hasher: what is done for each new token where it fills no block.

Before (`full`), as our rewriting of what vLLM 26112 describes: all that hashing a block needs is looked up,
and then no block is full. After (`installed`), vLLM's own asks first whether a block is full.

Claim: vLLM 26112 and 50114, by a trace alone. Of 16 tokens of a request, 15 fill no block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import INSTALLED, Change

Hasher = Callable[[Any], list[Any]]


def prepared(request: Any, start: int) -> tuple[int, Any]:
    """What hashing a block needs besides its tokens: its first picture or sound, and the hash before."""
    at, features = 0, request.mm_features
    if start > 0 and features:
        last = features[-1].mm_position
        at = len(features) if last.offset + last.length <= start else 0
    return at, request.block_hashes[-1] if request.block_hashes else None


def full(size: int, installed: Hasher) -> Hasher:
    """The before: prepares each time; a block that is full is hashed by vLLM's own."""

    def hasher(request: Any) -> list[Any]:
        start = len(request.block_hashes) * size
        prepared(request, start)
        return installed(request) if start + size <= request.num_tokens else []

    return hasher


def put_full() -> None:
    from vllm.v1.engine import core

    make = core.get_request_block_hasher

    def made(size: int, hash_function: Any) -> Hasher:
        return full(size, make(size, hash_function))

    core.get_request_block_hasher = made


def shown(scheduler: Any) -> str:
    """What a request that is there shows."""
    hasher = next(iter(scheduler.requests.values()))._block_hasher
    return "full" if hasher.__module__ == __name__ else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="block_hasher",
        module=__name__,
        choices=("full", INSTALLED),
        changes="whether hashing a block is prepared for each token, or once a block is full",
        source="vLLM 26112, 50114",
        rewritten="full",
        optional=True,
    ),
    needs=(
        ("vllm.v1.engine.core", "get_request_block_hasher", ("hash_block_size", "caching_hash_fn")),
        ("vllm.v1.request", "Request", ("num_tokens", "update_block_hashes")),
        ("vllm.v1.request", "Request.__init__", ("block_hasher",)),
    ),
    like={"vllm.v1.core.kv_cache_utils:get_request_block_hasher": "167549d7a130b359"},
    put={"full": put_full},
    shown=shown,
    prefix_cache=True,
)
