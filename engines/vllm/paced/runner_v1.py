"""vLLM's model runner V1 on the paced device, where an arm asks for it (toggle runner).

It computes on the host what V2 has kernels for, and on the card by torch's operations. So its sampler gets
logits that are real, of a few columns: its Python and its launches are there, and no arithmetic to speak of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from overlap_bench.engines.api import STEP_KINDS
from overlap_bench.engines.paced.device import sizes_of
from overlap_bench.engines.paced.tokens import draw
from overlap_bench.engines.vllm.paced import fits
from overlap_bench.engines.vllm.paced.card import answers_of, device, model_of, seed_for
from overlap_bench.engines.vllm.steps import kind_of

fits.check(fits.OF_V1)  # before a name that is missing ends an import

import vllm.compilation.cuda_graph as cuda_graph
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

COLUMNS = 8  # of the logits

# As on a card; a build for CPUs has other kernels, or none.
cuda_graph.weak_ref_tensors = lambda tensors: tensors
Sampler.greedy_sample = staticmethod(lambda logits: logits.argmax(dim=-1).view(-1))
TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native


class PacedRunnerV1(GPUModelRunner):  # type: ignore[misc]
    def load_model(self, *given: Any, **named: Any) -> None:
        super().load_model(*given, model=model_of(self.vllm_config, self._logits), **named)
        self._seeds: dict[str, int] = {}  # by request
        self._columns = torch.zeros(self.max_num_reqs, COLUMNS)
        self._words, self._eos = answers_of(self.model_config)

    def initialize_kv_cache_tensors(self, *given: Any, **named: Any) -> dict[str, Any]:
        return {}  # nothing is kept in it

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        device.launch()
        return self._columns[: hidden.shape[0]]

    def _lengths(self) -> Any:
        """Tokens of each request once the step is done."""
        rows = self.input_batch.num_reqs
        return self.input_batch.num_computed_tokens_cpu[:rows] + self.num_scheduled_tokens.np[:rows]

    def _model_forward(self, *given: Any, **named: Any) -> Any:
        rows, scheduled = self.input_batch.num_reqs, self.num_scheduled_tokens.np
        lengths = self._lengths()
        prompts = self.input_batch.num_prompt_tokens[:rows]
        prefilling = (lengths - scheduled[:rows] < prompts) | (scheduled[:rows] > 1)
        device.program.sizes = sizes_of(prefilling, scheduled[:rows], lengths, named["positions"].shape[-1])
        return super()._model_forward(*given, **named)

    def execute_model(self, scheduler_output: Any, *given: Any, **named: Any) -> Any:
        for name in scheduler_output.finished_req_ids:
            self._seeds.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._seeds[new.req_id] = seed_for(new)
        if not (scheduler_output.total_num_scheduled_tokens and device.serving):
            return super().execute_model(scheduler_output, *given, **named)
        device.begin(STEP_KINDS[kind_of(scheduler_output)])
        with device.counting():
            return super().execute_model(scheduler_output, *given, **named)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with device.counting():
            output = super().sample_tokens(grammar_output)
        if self.use_async_scheduling:
            device.launched()
        return output

    def _to_list(self, sampled: torch.Tensor) -> list[list[int]]:
        device.launched()  # and it waits for its tokens
        return super()._to_list(sampled)  # type: ignore[no-any-return]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = super()._sample(logits, spec_decode_metadata)
        names = self.input_batch.req_ids
        seeds = np.fromiter(map(self._seeds.__getitem__, names), np.uint64, len(names))
        ids = draw(seeds, self._lengths().astype(np.int64), self._words, self._eos)
        output.sampled_token_ids = torch.from_numpy(ids.astype(np.int32).reshape(-1, 1))
        return output
