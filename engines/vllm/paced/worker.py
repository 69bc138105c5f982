"""vLLM's worker and model runner (V2) on the paced device: what stands between them and a card is ours, and
nothing else is. Named to vLLM by the platform."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before the runner is imported, which takes names from what this replaces.
from overlap_bench.engines.vllm.paced.card import answers_of, device, model_of, seed_for

# isort: split
import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as runner
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from overlap_bench.engines.api import STEP_KINDS
from overlap_bench.engines.paced.device import sizes_of
from overlap_bench.engines.paced.tokens import RIGHT, draw, kept, rates_of
from overlap_bench.engines.vllm.paced import STARTED
from overlap_bench.engines.vllm.paced.platform import CARD
from overlap_bench.engines.vllm.steps import kind_of

ACTIVATIONS = 4 << 30  # bytes that a forward pass and its graphs take

runner.init_kv_cache = lambda *given, **named: {}  # nothing is kept in it


class PacedRunner(runner.GPUModelRunner):  # type: ignore[misc]
    def load_model(self, *given: Any, **named: Any) -> None:
        model = model_of(self.vllm_config, self._logits)
        runner.get_model_loader = lambda config: SimpleNamespace(load_model=lambda **asked: model)
        super().load_model(*given, **named)
        drafts = self.num_speculative_steps
        self._rows = torch.zeros(self.max_num_reqs * (1 + drafts), dtype=torch.int64)
        self._seeds = np.zeros(self.max_num_reqs, np.uint64)
        # Tokens of each request that are computed. vLLM's own count on the host takes every draft for right
        # until it knows better; its right one is the device's.
        self._computed = np.zeros(self.max_num_reqs, np.int64)
        stated = drafts and self.speculative_config.synthetic_acceptance_rates
        self._rates = rates_of(stated) if stated else np.full(drafts, RIGHT)
        self._words, self._eos = answers_of(self.model_config)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        device.launch()
        return torch.empty(hidden.shape[0], self.vocab_size, device="meta")

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            index = self.req_states.req_id_to_index[new.req_id]
            self._seeds[index] = seed_for(new)
            self._computed[index] = new.num_computed_tokens

    def prepare_inputs(self, scheduler_output: Any, state: Any, described: Any, *given: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, state, described, *given)
        batch.logits_indices = self._rows[: len(batch.logits_indices)]  # a kernel's, which wrote nothing
        if batch.num_draft_tokens_per_req is not None:
            rows = np.repeat(batch.idx_mapping_np, 1 + batch.num_draft_tokens_per_req)
            batch.expanded_idx_mapping = torch.from_numpy(rows)  # likewise
        device.program.sizes = sizes_of(
            batch.is_prefilling_np,
            batch.num_scheduled_tokens,
            self._lengths(batch),
            batch.num_tokens_after_padding,
        )
        return batch

    def _lengths(self, batch: Any) -> Any:
        """Tokens of each of its requests once the step is done, if all of its drafts are right."""
        return self._computed[batch.idx_mapping_np] + batch.num_scheduled_tokens

    def execute_model(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        if not (scheduler_output.total_num_scheduled_tokens and device.serving):
            return super().execute_model(scheduler_output, *given, **named)
        device.begin(STEP_KINDS[kind_of(scheduler_output)])
        with device.counting():
            return super().execute_model(scheduler_output, *given, **named)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with device.counting():
            output = super().sample_tokens(grammar_output)
        device.launched()
        return output

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        drafts = batch.num_draft_tokens_per_req
        if drafts is not None:  # they go where the logits are: nowhere
            batch.input_ids = torch.empty(batch.input_ids.shape, dtype=torch.int32, device="meta")
        output, _, _ = super().sample(hidden_states, batch, grammar_output)
        lengths, seeds = self._lengths(batch), self._seeds[batch.idx_mapping_np]
        sampled = (lengths >= batch.prefill_len_np).astype(np.int32)
        rejected = np.zeros_like(sampled)
        positions = lengths[:, None]
        if drafts is not None:
            positions = positions - drafts[:, None] + np.arange(1 + len(self._rates))
            right = np.minimum(kept(seeds[:, None], positions[:, :-1], self._rates), drafts)
            # Drafts behind a prompt's last token stand for none: vLLM fills a graph's rows up by them.
            right[self._computed[batch.idx_mapping_np] < batch.prefill_len_np] = 0
            rejected = (sampled * (drafts - right)).astype(np.int32)
            sampled = (sampled * (1 + right)).astype(np.int32)
        self._computed[batch.idx_mapping_np] = lengths - rejected
        ids = draw(seeds[:, None], positions, self._words, self._eos)
        output.sampled_token_ids = torch.from_numpy(ids)
        output.num_sampled, output.num_rejected = torch.from_numpy(sampled), torch.from_numpy(rejected)
        if output.logprobs_tensors is not None:
            if drafts is not None:
                seeds = np.repeat(seeds, 1 + drafts)
                scored = np.arange(ids.shape[1]) <= drafts[:, None]
                ids, positions = ids[scored], positions[scored]
            output.logprobs_tensors = self._scored(
                output.logprobs_tensors, ids.reshape(-1), seeds, positions.reshape(-1)
            )
        return output, output.num_sampled, output.num_rejected

    def _scored(self, shaped: Any, ids: Any, seeds: Any, lengths: Any) -> Any:
        """Log probabilities in the shape that the sampler gave: of the token, then of others."""
        rows, columns = shaped.logprob_token_ids.shape
        # By NumPy, all at once: torch's operations would count as launches, and time is the host's.
        places = lengths[:, None] + 1_000_003 * np.arange(2, columns + 1)
        others = draw(seeds[:, None], places, self._words, None)
        scores = np.tile(-0.5 * np.arange(1, columns + 1, dtype=np.float32), (rows, 1))
        ranks = np.ones(rows, np.int64)
        return shaped._replace(
            logprob_token_ids=torch.from_numpy(np.concatenate([ids[:, None], others], axis=1)),
            logprobs=torch.from_numpy(scores),
            selected_token_ranks=torch.from_numpy(ranks),
        )


class PacedWorker(Worker):  # type: ignore[misc]
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        set_random_seed(self.model_config.seed)
        init_workspace_manager(self.device, 1, 1)
        self.model_runner = self._runner()(self.vllm_config, self.device)

    def _runner(self) -> type:
        if self.vllm_config.use_v2_model_runner:
            return PacedRunner
        from overlap_bench.engines.vllm.paced.runner_v1 import PacedRunnerV1

        return PacedRunnerV1

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
