"""Which requests can never run, and why: a line for the client at submit, in place of a failure on a step."""

from __future__ import annotations

import math

from overlap_bench.engines.api import EngineOptions, Request
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.request import Active


def why_refused(
    active: Active, options: EngineOptions, vocabulary: int, pool: BlockPool, chunks: bool = False
) -> str | None:
    """None where `active` can run with these options, a model of `vocabulary` ids, and this block pool.
    `chunks`: prompts are prefilled in chunks, so they may be longer than one prefill."""
    prompt, most = len(active.prompt), active.request.max_new_tokens
    if not prompt:
        return "the prompt is empty"
    if most < 1:
        return f"max_new_tokens is {most}; at least one token must be asked for"
    if prompt + most > options.max_context:
        return f"a prompt of {prompt} tokens and {most} new ones exceed max_context={options.max_context}"
    if prompt > options.prefill_max_tokens and not chunks:
        return f"a prompt of {prompt} tokens exceeds prefill_max_tokens={options.prefill_max_tokens}"
    if max(active.prompt) >= vocabulary or min(active.prompt) < 0:
        return f"the prompt has ids beyond the model's vocabulary, 0 to {vocabulary - 1}"
    if "" in active.request.stop:
        return "a stop string is empty"
    reason = _why_not_sampled(active.request, options) or _why_not_scored(active.request, options, vocabulary)
    if reason is not None:
        return reason
    if pool.blocks_for(active.most_kv_tokens) > pool.capacity:
        return f"{prompt + most} tokens do not fit into {pool.capacity} KV blocks of {pool.block_size}"
    return None


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
