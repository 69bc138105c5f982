"""What is taken from vLLM by name, and which of it a version lacks: said by name, before anything boots."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from overlap_bench.engines.api import BadSetting

TRIED = "0.32.0"
# A module, a name in it, and what of that is relied on: parameters of a function, attributes of a class.
Taken = tuple[tuple[str, str, tuple[str, ...]], ...]
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
    vllm: Any = import_module("vllm")
    return str(vllm.__version__)


def missing(taken: Taken) -> list[str]:
    """What this vLLM lacks of it, by name."""
    lacking = []
    for module, name, relied_on in taken:
        where = f"{module}.{name}"
        try:
            found = _found(module, name)
        except (ImportError, AttributeError):
            lacking.append(where)
            continue
        has = _names(found)
        lacking += [f"{where}'s {each}" for each in relied_on if each not in has]
    return lacking


def check() -> None:
    """Raises BadSetting for a vLLM that lacks what every arm takes. It imports much of it: not for a process
    that is to serve."""
    if lacking := missing(TAKEN):
        raise BadSetting(
            f"vLLM {version()} does not fit, {TRIED} was tried: it has no {', no '.join(lacking)}"
        )


def other(like: Mapping[str, str]) -> list[str]:
    """Which of these functions, "module:name", read otherwise than as our own side of them was written.
    `like`: the digest of each as it was then. One that is not there is another one, too."""
    return [each for each, known in like.items() if _digest(*each.split(":")) != known]


def _digest(module: str, name: str) -> str:
    """Digest of a function's lines, without how far they are indented; "" where it has none."""
    try:
        lines = inspect.getsource(_found(module, name)).splitlines()
    except (ImportError, AttributeError, TypeError, OSError):
        return ""
    text = "\n".join(line.strip() for line in lines if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _found(module: str, name: str) -> Any:
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _names(found: Any) -> set[str]:
    """A function's parameters; or what a class, or its instances, have."""
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters)
    annotated = {name for each in found.__mro__ for name in getattr(each, "__annotations__", {})}
    return {*dir(found), *annotated}
