"""vLLM's own host code at a GPU's pace: only the device is replaced, by a clock.

Importing this costs milliseconds, and does not need vLLM.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_bench.engines.api import EngineError

if TYPE_CHECKING:
    from overlap_bench.engines.paced.device import Device

PACE = "BENCH_VLLM_PACE"  # in the environment of every process of the engine: what device it has
REPLACED = (
    "the card: Triton's driver (the Python of its launches is as installed), CUDA graphs, the forward pass, "
    "the sampler's arithmetic and tokens (and which drafts are right: half, once those before them are, "
    "unless vLLM's synthetic_acceptance_rates say otherwise), events, streams, copies to the card, and the "
    "KV cache's memory; what reads the card's memory at once (.item(), .cpu(), .tolist()) does not wait for "
    "it"
)
STARTED = "BENCH_VLLM_STARTED"  # a file that is written to once a paced device serves
GIL = "BENCH_VLLM_GIL"  # "held": driver calls hold it, as no driver does, to show what that changes
PLUGIN = Path(__file__).with_name("plugin")  # what vLLM finds its platform by: an entry point, with no code


def register() -> str | None:
    """The entry point of vllm.platform_plugins: a platform, where a pace was asked for."""
    return "overlap_bench.engines.vllm.paced.platform.PacedPlatform" if PACE in os.environ else None


def size_as_on_a_card() -> None:
    """The entry point of vllm.general_plugins: what vLLM takes by default for a step's size."""
    if PACE not in os.environ:
        return
    from vllm.engine.arg_utils import EngineArgs

    from overlap_bench.engines.vllm.paced.platform import PacedPlatform

    own = getattr(EngineArgs, "get_batch_defaults", None)
    if own is None:
        raise EngineError(
            "this vLLM does not fit: it has no vllm.engine.arg_utils.EngineArgs.get_batch_defaults"
        )
    EngineArgs.get_batch_defaults = classmethod(
        lambda cls, world_size: PacedPlatform.batch_defaults(partial(own, world_size))
    )


def environment(pace: str) -> dict[str, str]:
    """What a process is started with whose vLLM is to run on a device of that pace."""
    return {
        PACE: pace,
        **plugin(),
        "OMP_NUM_THREADS": "1",  # nothing computes; more threads would wake for each small operation
    }


def plugin() -> dict[str, str]:
    """What a process is started with whose vLLM is to find our plug-ins."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))}


def tell(pace: str) -> None:
    """Have vLLM find our plug-ins, and run on a device of that pace if there is one, here and in a process
    that this starts. Before it is imported."""
    os.environ |= environment(pace) if pace else plugin()
    sys.path.insert(0, str(PLUGIN))


def own_device() -> Device | None:
    """The paced device of this process; None where it has a real one."""
    if PACE not in os.environ:
        return None
    from overlap_bench.engines.vllm.paced.cuda import INSTALLED

    if not INSTALLED:
        raise EngineError("vLLM did not take the pace: its platform is not the paced one")
    return INSTALLED[-1]
