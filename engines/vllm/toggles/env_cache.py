"""env_cache: what reading one of vLLM's environment variables costs, once it serves.

Before (`off`), each read of `envs.NAME` asks the environment and converts what it finds. After (`on`), the
core has read all of them once and keeps them.

Claim: vLLM 26146 and 29289, `_get_num_input_tokens` 11 -> 5 us (of runner V1). Both sides are vLLM's own: the
before leaves out the calls of its enable_envs_cache, in the core and in a worker of its own. Most of what a
step gains is of one read for each request in the statistics of its output: with a core in a process of its
own, as in vLLM's server, outputs are processed where nothing is kept, in either choice.
"""

from __future__ import annotations

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change


def put_off() -> None:
    from vllm.v1.engine import core
    from vllm.v1.executor import multiproc_executor

    core.enable_envs_cache = multiproc_executor.enable_envs_cache = lambda: None


def shown(scheduler: object) -> str:
    from vllm import envs

    return "on" if hasattr(envs.__getattr__, "cache_clear") else "off"


CHANGE = Change(
    toggle=Toggle(
        name="env_cache",
        module=__name__,
        choices=("off", "on"),
        changes="whether vLLM's environment variables are read anew each time, or once",
        source="vLLM 26146, 29289",
        optional=True,
    ),
    needs=(
        ("vllm.v1.engine.core", "enable_envs_cache", ()),
        ("vllm.v1.executor.multiproc_executor", "enable_envs_cache", ()),
        ("vllm.envs", "__getattr__", ()),
    ),
    put={"off": put_off},
    shown=shown,
)
