"""Which requests can never run, and why: a line for the client at submit, in place of a failure on a step."""

from __future__ import annotations

import math

from overlap_bench.engines.api import EngineOptions, Request
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.requests import why_impossible


def why_refused(
    active: Active, options: EngineOptions, vocabulary: int, pool: BlockPool, chunks: bool = False
) -> str | None:
    """None where `active` can run with these options, a model of `vocabulary` ids, and this block pool.
    `chunks`: prompts are prefilled in chunks, so they may be longer than one prefill."""
    request = active.request
    reason = (
        why_impossible(request, active.prompt, options, vocabulary, whole=not chunks)
        or _why_not_sampled(request, options)
        or _why_not_scored(request, options, vocabulary)
    )
    if reason is None and pool.blocks_for(active.most_kv_tokens) > pool.capacity:
        return f"{active.limit} tokens do not fit into {pool.capacity} KV blocks of {pool.block_size}"
    return reason


def _why_not_sampled(request: Request, options: EngineOptions) -> str | None:
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature is {request.temperature:g}; it must be 0 (greedy) or above"
    if request.top_k < 0:
        return f"top_k is {request.top_k}; it must be 0 (all) or above"
    if request.top_k >= 1 << 31:
        return f"top_k {request.top_k} does not fit into 32 bits"
    if not 0 < request.top_p <= 1:
        return f"top_p is {request.top_p:g}; it must be above 0 and at most 1 (all)"
    if not -(1 << 63) <= request.seed < 1 << 63:
        return f"seed {request.seed} does not fit into 64 bits"
    if request.temperature > 0 and not options.sampling:
        return "a temperature needs an engine started with sampling=on"
    return None


def _why_not_scored(request: Request, options: EngineOptions, vocabulary: int) -> str | None:
    forced = request.forced
    if not forced:
        return None
    if not options.scoring:
        return "forced tokens need an engine started with scoring=on"
    if len(forced) != request.max_new_tokens:
        return f"max_new_tokens is {request.max_new_tokens}, and {len(forced)} tokens are forced"
    if max(forced) >= vocabulary or min(forced) < 0:
        return f"forced tokens have ids beyond the model's vocabulary, 0 to {vocabulary - 1}"
    return None
