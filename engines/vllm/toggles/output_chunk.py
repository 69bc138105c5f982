"""output_chunk: how many outputs of a step are processed before the event loop may do something else.

Before (`all`), all of a step's outputs in one go. After (`128`), vLLM's default: 128 at a time, and the loop
sends what is ready between two of them.

Claim: vLLM 12287, tail latency. It shows with more than 128 requests in a step, where the core is a process
of its own. vLLM's own variable VLLM_V1_OUTPUT_PROC_CHUNK_SIZE, read where outputs are processed.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change

VARIABLE = "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"
SIZES = {"all": 1_000_000, "128": 128, "32": 32}


def shown(scheduler: None) -> str:
    from vllm import envs

    found = getattr(envs, VARIABLE)
    return next((choice for choice, size in SIZES.items() if size == found), str(found))


CHANGE = Change(
    toggle=Toggle(
        name="output_chunk",
        module=__name__,
        choices=tuple(SIZES),
        after="128",
        changes="how many outputs of a step are processed at a time",
        source="vLLM VLLM_V1_OUTPUT_PROC_CHUNK_SIZE; pull request 12287",
        requires={"*": {"multiprocessing": ("on",)}},
        optional=True,
    ),
    needs=(("vllm.v1.engine.async_llm", "AsyncLLM", ("_run_output_handler",)),),
    variables={choice: {VARIABLE: str(size)} for choice, size in SIZES.items()},
    shown=shown,
    in_core=False,
)
