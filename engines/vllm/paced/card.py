"""The paced device in this process, and what V1 and V2 ask of a card: named here, so that either runner can
be imported by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from overlap_bench.engines.pace import make_pace
from overlap_bench.engines.paced.device import Device
from overlap_bench.engines.vllm.paced import GIL, PACE, fits
from overlap_bench.engines.vllm.paced.cuda import install

device = Device(make_pace(os.environ[PACE]), held=os.environ.get(GIL) == "held")
install(device)  # before the runner is imported, which takes names from what this replaces

import numpy as np
import torch
import vllm.utils.torch_utils as torch_utils
import vllm.v1.attention.backends.fa_utils as fa_utils
import vllm.v1.worker.gpu.buffer_utils as buffer_utils


def _pin() -> None:
    """Pay for a small pinned buffer, made anew."""
    device.spend(device.ledger.pin_ns)


def copied(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> torch.Tensor:
    """async_tensor_h2d's contract: staged in pinned memory, then copied to the device; here both are the
    host's memory."""
    source = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
    if not isinstance(source, torch.Tensor) or not source.is_pinned():
        _pin()
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, dtype=dtype or (None if out is None else out.dtype))
    if out is not None:
        done: torch.Tensor = out.copy_(source)
        return done
    return source.to(dtype=dtype or source.dtype, copy=True)


class SharedBuffer:
    """A buffer that device and host see alike (UvaBuffer)."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu if n is None else self.cpu[:n]


torch_utils.async_tensor_h2d = copied
buffer_utils.UvaBuffer = SharedBuffer
fa_utils.get_flash_attn_version = lambda *given, **named: 3

fits.check()  # before a name that is missing ends an import

import vllm.v1.attention.backends.flash_attn as flash_attn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import set_default_torch_dtype

from overlap_bench.engines.paced.tokens import seed_of, vocabulary

OF_ATTENTION = 2  # launches of a layer's: it writes keys and values, and attends
WIDTH = 8  # of the hidden states, which nobody reads


def scheduler_metadata(*, batch_size: int, **named: Any) -> torch.Tensor:
    """FlashAttention 3's plan of a batch, a launch of its own on a card."""
    device.launch()
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)


flash_attn.get_scheduler_metadata = scheduler_metadata


def model_of(config: Any, logits: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The model of this VllmConfig, without weights, whose forward pass is the clock's."""
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(vllm_config=config)
    attentions = sum(isinstance(each, AttentionLayerBase) for each in model.modules())
    kernels = kernels_of(model)

    def forward(positions: torch.Tensor, **given: Any) -> torch.Tensor:
        """A step that no whole graph fits: a card runs it in pieces between the layers of attention, each a
        graph up to the most tokens that there is one for."""
        graphs = positions.shape[-1] <= (config.compilation_config.max_cudagraph_capture_size or 0)
        device.run_pieces(1 + attentions, 0 if graphs else kernels, between=OF_ATTENTION)
        return torch.zeros(positions.shape[-1], WIDTH)

    model.forward, model.compute_logits = forward, logits
    return model


def answers_of(model_config: Any) -> tuple[Any, int | None]:
    """What answers are made of: ids, and the one that ends a text."""
    tokenizer = cached_tokenizer_from_config(model_config)
    eos = model_config.hf_text_config.eos_token_id
    words = vocabulary(len(tokenizer), lambda each: str(tokenizer.decode([each])))
    return words, eos[0] if isinstance(eos, list) else eos


def seed_for(new: Any) -> int:
    """What the tokens of this NewRequestData follow from."""
    params = new.sampling_params
    seed = params.seed if params is not None and params.temperature else None
    return seed_of(new.prompt_token_ids, seed)


def kernels_of(module: torch.nn.Module) -> int:
    """What a forward pass launches beside its attention once it is compiled: a kernel for each layer."""
    if isinstance(module, (AttentionLayerBase, LogitsProcessor, ParallelLMHead)):
        return 0
    children = list(module.children())
    return sum(map(kernels_of, children)) if children else 1
