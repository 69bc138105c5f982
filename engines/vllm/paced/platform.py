"""What vLLM asks about the machine it runs on: the choices of a card, with tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability, Platform

from overlap_bench.engines.vllm.paced.cuda import offer_triton
from overlap_bench.engines.vllm.toggles.spec import METHODS

offer_triton()  # before vLLM looks whether there is a Triton


CARD = 80 << 30  # bytes of memory
FLASH = "FLASH_ATTN"


class PacedPlatform(CpuPlatform):  # type: ignore[misc]
    """CUDA's: runner V2 (or V1, where it is asked for), UniProc, blocks of 16, FlashAttention's metadata, a
    graph per decode batch, async scheduling as it was asked for."""

    device_name = "paced"
    _as_a_card = False  # while vLLM looks up how many requests and tokens a step of such a device may have

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return CARD if cls._as_a_card else int(super().get_device_total_memory(device_id))

    def is_cpu(self) -> bool:
        return not self._as_a_card and bool(super().is_cpu())

    @classmethod
    def batch_defaults(cls, find: Callable[[], Any]) -> Any:
        """What vLLM finds by default on a card, and not on a CPU: a server has a fraction of the requests and
        tokens in a step there."""
        cls._as_a_card = True
        try:
            return find()
        finally:
            cls._as_a_card = False

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "paced"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(major=9, minor=0)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is not None and selected_backend.name != FLASH:
            raise ValueError(f"the paced device has the attention backend {FLASH} alone")
        return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def graph_pool_handle(cls) -> object:
        return object()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """The forward pass is the clock's: there is nothing to compile, and no piece of a graph."""
        # vllm.config asks for a platform when it is imported.
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        if vllm_config.model_config is not None and vllm_config.model_config.enforce_eager:
            raise ValueError(
                "the paced device does not know enforce_eager, whose launches a pace does not count"
            )
        if compilation.cudagraph_mode not in (None, CUDAGraphMode.FULL_DECODE_ONLY):
            raise ValueError("the paced device has the cudagraph_mode FULL_DECODE_ONLY alone")
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        spec, v1 = vllm_config.speculative_config, not vllm_config.use_v2_model_runner
        for name, used in (
            ("speculative decoding but by n-grams", spec is not None and spec.method not in METHODS),
            ("speculative decoding by the V1 model runner", spec is not None and v1),
            ("LoRA", vllm_config.lora_config is not None),
            ("several ranks", parallel.world_size * parallel.data_parallel_size > 1),
        ):
            if used:
                raise ValueError(f"the paced device does not know {name}: leave it out")
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "overlap_bench.engines.vllm.paced.worker.PacedWorker"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        if (
            getattr(params, "structured_outputs", None)
            or getattr(params, "prompt_logprobs", None) is not None
        ):
            raise ValueError("the paced device knows no structured outputs and no logprobs of prompts")
        if envs.VLLM_USE_V2_MODEL_RUNNER is False and getattr(params, "logprobs", None) is not None:
            raise ValueError("with model runner V1 the paced device knows no log probabilities")

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)

    @classmethod
    def import_kernels(cls) -> None:
        pass

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()
