"""runner: which of vLLM's two model runners prepares a step, launches it and samples.

Before (`v1`), inputs are prepared on the host by numpy, and copied; it samples by torch's operations. After
(`v2`), most of that is a few Triton kernels, and the host keeps less of a request's state.

Claim: vLLM 0.32 calls V1 deprecated, and takes V2 wherever Triton is usable; no number. vLLM's own variable
VLLM_USE_V2_MODEL_RUNNER. At a pace V1 knows no drafts and no log probabilities.
"""

from __future__ import annotations

from typing import Any

from overlap_bench.engines.api import Toggle
from overlap_bench.engines.vllm.toggles.change import Change

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


def shown(scheduler: Any) -> str:
    return "v2" if scheduler.vllm_config.use_v2_model_runner else "v1"


CHANGE = Change(
    toggle=Toggle(
        name="runner",
        module=__name__,
        choices=("v1", "v2"),
        changes="which of vLLM's model runners prepares a step, launches it and samples",
        source="vLLM VLLM_USE_V2_MODEL_RUNNER",
        optional=True,
    ),
    needs=(("vllm.config", "VllmConfig", ("use_v2_model_runner",)),),
    variables={"v1": {VARIABLE: "0"}, "v2": {VARIABLE: "1"}},
    shown=shown,
)
