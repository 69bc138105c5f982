"""What is taken from vLLM by name, and which of it a version lacks: said by name, before anything boots."""

from __future__ import annotations

from importlib import import_module

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.fits import Taken, missing

TRIED = "0.32.0"
TAKEN: Taken = (  # by an arm, whatever it is set to
    (
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        ("async_scheduling", "num_gpu_blocks_override", "scheduler_cls", "stream_interval"),
    ),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", ()),
    ("vllm.v1.core.sched.interface", "PauseState", ("PAUSED_ALL", "UNPAUSED")),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "total_num_scheduled_tokens"),
    ),
    ("vllm.v1.core.sched.output", "CachedRequestData", ("num_output_tokens", "req_ids", "resumed_req_ids")),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("add_request", "schedule", "set_pause_state", "update_from_output", "_preempt_request"),
    ),
    ("vllm.v1.engine.async_llm", "AsyncLLM", ("from_vllm_config", "generate", "shutdown")),
    ("vllm.v1.engine.exceptions", "EngineDeadError", ()),
    ("vllm.v1.engine.llm_engine", "LLMEngine", ("abort_request", "add_request", "from_vllm_config", "step")),
)


def version() -> str:
    return str(import_module("vllm").__version__)


def check() -> None:
    """Raises BadSetting for a vLLM that lacks what every arm takes. It imports much of it: not for a process
    that is to serve."""
    if lacking := missing(TAKEN):
        raise BadSetting(
            f"vLLM {version()} does not fit, {TRIED} was tried: it has no {', no '.join(lacking)}"
        )
