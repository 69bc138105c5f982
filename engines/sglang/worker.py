"""SGLang's model runner on the card that is a clock: what stands between them and CUDA is ours, and nothing
else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import sglang.srt.distributed.bootstrap as bootstrap
import sglang.srt.layers.attention.triton_backend as triton_backend
import sglang.srt.model_executor.model_runner as model_runner
import sglang.srt.model_executor.runner.decode_cuda_graph_runner as decode_runner
import torch
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

from overlap_bench.engines.paced.device import Device
from overlap_bench.engines.sglang_base import worker

CORES = 132  # of the card, an H100's
MEMORY = 1 << 50  # bytes that a KV cache may take: its slots are as many as were asked for


class Model(worker.Model):
    shared_experts_config = SharedExpertsConfig()


class UnfilledPool(worker.Unfilled, MHATokenToKVPool):  # type: ignore[misc]
    """The KV cache."""


class PacedRunner(worker.Answering, model_runner.ModelRunner):  # type: ignore[misc]
    card: ClassVar[Device]

    def load_model(self) -> None:
        self.model = Model(self.card)
        self.loader = SimpleNamespace(preloaded_weights_bytes=0)
        self.dtype = self.model_config.dtype
        self.sliding_window_size = None
        self.prefill_aware_swa = False
        self.weight_load_mem_usage = 0.0

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """Have graphs too, which SGLang leaves out where the device is called "cpu"."""
        graphs = get_exec().graph.cuda_graph_config.decode
        graphs.backend = Backend.FULL
        graphs.bs = generate_decode_cuda_graph_batch_sizes(self.server_args, self.max_running_requests)
        super().init_cuda_graphs(capture_decode_cuda_graph)
        self.decode_cuda_graph_runner = decode_runner.DecodeCudaGraphRunner(self)
        self.answers = torch.zeros(self.req_to_token_pool.req_to_token.shape, dtype=torch.int64)


def install(card: Device) -> None:
    """Have SGLang make these in the place of its own."""
    PacedRunner.card = card
    model_runner.ModelRunner = PacedRunner
    triton_backend.get_device_core_count = lambda device=0: CORES
    # The host's own free memory differs from boot to boot, and so would the slots of two arms.
    KVCacheConfigurator._profile_available_bytes = lambda *given: MEMORY
    # Ranks, and the threads that a model computes with.
    bootstrap._bind_threads_if_cpu = lambda *, device: None
    bootstrap._init_cpu_threads_env = lambda **named: None
