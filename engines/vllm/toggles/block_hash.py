"""block_hash: what names a full block of tokens in the prefix cache.

Before (`sha256`), pickle and SHA-256 of the block's tokens and of the hash before it; after (`xxhash`),
pickle and xxHash, which is no cryptographic hash. `sha256_cbor` is the same in every process and language.

Claim: vLLM 29163, much faster than SHA-256; by 43789's own benchmark, 0.070 against 0.103 s for 100,000
blocks of 32 tokens (an Apple notebook). A decode step hashes a block of each request once in 16 steps. vLLM's
flag --prefix-caching-hash-algo, in force where the core's configuration says so.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change

CHOICES = ("sha256", "sha256_cbor", "xxhash")
CHANGE = Change(
    toggle=Toggle(
        name="block_hash",
        module=__name__,
        choices=CHOICES,
        changes="by which algorithm the prefix cache names a block: SHA-256 of pickle or CBOR, or xxHash",
        source="vLLM --prefix-caching-hash-algo; pull requests 29163, 43789",
        optional=True,
    ),
    needs=(("vllm.engine.arg_utils", "AsyncEngineArgs", ("prefix_caching_hash_algo",)),),
    packages={"xxhash": "xxhash"},
    arguments={each: {"prefix_caching_hash_algo": each} for each in CHOICES},
    shown=lambda scheduler: str(scheduler.cache_config.prefix_caching_hash_algo),
    prefix_cache=True,
)
