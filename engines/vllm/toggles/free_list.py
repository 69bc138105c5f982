"""free_list: how several free KV blocks are taken at once.

Before (`one-by-one`), as our rewriting of what vLLM 21222 says it replaced: each is taken from the list's
head, which is joined anew for each. After (`installed`), vLLM's own takes the first n and joins the head
once.

Claim: vLLM 21222, half of the list's operations (21005 before it: no comparison of blocks by their fields);
microbenchmarks. 21222 also puts several back at once, which is the same in both choices here. A decode step
takes one block at most for each request, so it is prefills that take several.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import INSTALLED, Change


def one_by_one(queue: Any, n: int) -> list[Any]:
    """The before."""
    return [queue.popleft() for _ in range(n)]


def put_one_by_one() -> None:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    FreeKVCacheBlockQueue.popleft_n = one_by_one


def shown(scheduler: Any) -> str:
    queue = type(scheduler.kv_cache_manager.block_pool.free_block_queue)
    return "one-by-one" if queue.popleft_n is one_by_one else INSTALLED


CHANGE = Change(
    toggle=Toggle(
        name="free_list",
        module=__name__,
        choices=("one-by-one", INSTALLED),
        changes="whether free KV blocks are taken one by one, or several at once",
        source="vLLM 21005, 21222",
        rewritten="one-by-one",
        optional=True,
    ),
    needs=(
        ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", ("popleft", "popleft_n")),
        ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft_n", ("n",)),
    ),
    put={"one-by-one": put_one_by_one},
    shown=shown,
)
