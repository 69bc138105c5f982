"""spec: whether a decode step tries tokens that may come next, and keeps those that do.

Before (`off`), a decode step computes one token of each request. After (`ngram_gpu`), three drafts are found
in its own text, by its two newest tokens, and verified with it. These are vLLM's own names: runner V1 finds
those of `ngram` on the CPU, and async scheduling does not take them; runner V2 finds both on the device.

Claim: vLLM 4237 and 40704, none in numbers; under async scheduling 29184, 21 to 39% more tokens a second.
vLLM's own flag, --speculative-config. At a pace nothing is found: which drafts are right follows from the
prompt and the index (../paced/worker.py), half of them once those before them are, or as often as vLLM's
synthetic_acceptance_rates say.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change

METHODS = ("ngram", "ngram_gpu")
LOOKUP = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 2}


def shown(scheduler: Any) -> str:
    config = scheduler.vllm_config.speculative_config
    return "off" if config is None else str(config.method)


CHANGE = Change(
    toggle=Toggle(
        name="spec",
        module=__name__,
        choices=("off", *METHODS),
        changes="whether a decode step computes one token of each request, or verifies drafts that are found "
        "in its own text",
        source="vLLM --speculative-config; pull requests 4237, 29184, 40704",
        counters=("draft_tokens", "accepted_drafts"),
        optional=True,
    ),
    needs=(("vllm.config", "SpeculativeConfig", ("method", *LOOKUP)),),
    arguments={method: {"speculative_config": {"method": method, **LOOKUP}} for method in METHODS},
    shown=shown,
)
