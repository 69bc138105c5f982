"""vLLM's worker and model runner (V2) on the paced device: what stands between them and a card is ours, and
nothing else is. Named to vLLM by the platform."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from overlap_bench.engines.vllm.paced import STARTED, fits, told
from overlap_bench.engines.vllm.paced.cuda import install

device = told()
install(device)  # before the runner is imported, which takes names from what this replaces

import numpy as np
import torch
import vllm.utils.torch_utils as torch_utils
import vllm.v1.attention.backends.fa_utils as fa_utils
import vllm.v1.worker.gpu.buffer_utils as buffer_utils


def copied(data: Any, device: Any = None, dtype: Any = None, out: Any = None) -> torch.Tensor:
    """async_tensor_h2d's contract: staged in pinned memory, then copied to the device; here both are the
    host's memory."""
    source = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
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
import vllm.v1.worker.gpu.model_runner as runner
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.torch_utils import set_default_torch_dtype, set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from overlap_bench.engines.pace import Size
from overlap_bench.engines.paced.tokens import draw, seed_of, vocabulary

CARD = 80 << 30  # bytes
ACTIVATIONS = 4 << 30  # bytes that a forward pass and its graphs take
WIDTH = 8  # of the hidden states, which nobody reads


def scheduler_metadata(*, batch_size: int, **named: Any) -> torch.Tensor:
    """FlashAttention 3's plan of a batch, a launch of its own on a card."""
    device.launch()
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)


flash_attn.get_scheduler_metadata = scheduler_metadata
runner.init_kv_cache = lambda *given, **named: {}  # nothing is kept in it


class PacedRunner(runner.GPUModelRunner):  # type: ignore[misc]
    def load_model(self, *given: Any, **named: Any) -> None:
        with set_default_torch_dtype(self.model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=self.vllm_config)
        model.forward = self._forward
        model.compute_logits = self._logits
        super().load_model(*given, model=model, **named)
        self._rows = torch.zeros(self.max_num_reqs, dtype=torch.int64)
        self._seeds = np.zeros(self.max_num_reqs, np.uint64)
        tokenizer = cached_tokenizer_from_config(self.model_config)
        self._words = vocabulary(len(tokenizer), lambda each: str(tokenizer.decode([each])))
        eos = self.model_config.hf_text_config.eos_token_id
        self._eos = eos[0] if isinstance(eos, list) else eos

    def _forward(self, positions: torch.Tensor, **given: Any) -> torch.Tensor:
        device.prepared()
        device.forward()
        return torch.zeros(positions.shape[-1], WIDTH)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        device.launch()
        return torch.empty(hidden.shape[0], self.vocab_size, device="meta")

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            seed = params.seed if params is not None and params.temperature else None
            self._seeds[self.req_states.req_id_to_index[new.req_id]] = seed_of(
                new.prefill_token_ids[: new.prompt_len], seed
            )

    def prepare_inputs(self, scheduler_output: Any, state: Any, described: Any, *given: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, state, described, *given)
        batch.logits_indices = self._rows[: batch.num_reqs]  # a kernel's, which wrote nothing
        device.program.sizes = sizes_of(batch)
        return batch

    def execute_model(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        if not (scheduler_output.total_num_scheduled_tokens and device.serving):
            return super().execute_model(scheduler_output, *given, **named)
        device.begin(kind_of(scheduler_output))
        with device.counting():
            return super().execute_model(scheduler_output, *given, **named)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with device.counting():
            output = super().sample_tokens(grammar_output)
        device.charge()
        device.launched()
        return output

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        output, _, _ = super().sample(hidden_states, batch, grammar_output)
        lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        seeds = self._seeds[batch.idx_mapping_np]
        ids = draw(seeds, lengths, self._words, self._eos)
        output.sampled_token_ids = torch.from_numpy(ids).view(-1, 1)
        output.num_sampled = torch.from_numpy((lengths >= batch.prefill_len_np).astype(np.int32))
        output.num_rejected = torch.zeros(batch.num_reqs, dtype=torch.int32)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors = self._scored(output.logprobs_tensors, ids, seeds, lengths)
        return output, output.num_sampled, output.num_rejected

    def _scored(self, shaped: Any, ids: Any, seeds: Any, lengths: Any) -> Any:
        """Log probabilities in the shape that the sampler gave: of the token, then of others."""
        rows, columns = shaped.logprob_token_ids.shape
        others = [draw(seeds, lengths + 1_000_003 * (1 + each), self._words, None) for each in range(columns)]
        scores = -0.5 * (1 + torch.arange(columns, dtype=torch.float32))
        return shaped._replace(
            logprob_token_ids=torch.from_numpy(np.stack([ids, *others[1:]], axis=1)),
            logprobs=scores.expand(rows, columns).contiguous(),
            selected_token_ranks=torch.ones(rows, dtype=shaped.selected_token_ranks.dtype),
        )


def sizes_of(batch: Any) -> list[Size]:
    """What the step of this InputBatch computes; a decode is padded as its graph is."""
    prefilling = batch.is_prefilling_np
    lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    prefills = int(prefilling.sum())
    decodes = batch.num_reqs - prefills
    sizes = []
    if decodes:
        rows = decodes if prefills else batch.num_reqs_after_padding
        sizes.append(Size("decode", rows, rows, int(lengths[~prefilling].max())))
    if prefills:
        tokens = int(batch.num_scheduled_tokens[prefilling].sum())
        sizes.append(Size("prefill", prefills, tokens, int(lengths[prefilling].max())))
    return sizes


def kind_of(scheduler_output: Any) -> str:
    new, cached = len(scheduler_output.scheduled_new_reqs), scheduler_output.scheduled_cached_reqs
    parts = new + sum(not tokens for tokens in cached.num_output_tokens)
    if not parts:
        return "decode"
    return "prefill" if parts == len(scheduler_output.num_scheduled_tokens) else "mixed"


class PacedWorker(Worker):  # type: ignore[misc]
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        init_workspace_manager(self.device, 1, 1)
        self.model_runner = PacedRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """What is left for the KV cache of as many cards as the weights take, at vLLM's share of them."""
        weights = sum(each.numel() * each.element_size() for each in self.model_runner.model.parameters())
        cards = -(-weights // (CARD * 2 // 3))
        return int(cards * CARD * self.cache_config.gpu_memory_utilization - weights - ACTIVATIONS)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        device.serving = True
        if STARTED in os.environ:
            Path(os.environ[STARTED]).write_text("paced", "utf-8")
        return CompilationTimes(language_model=0.0, encoder=0.0)
