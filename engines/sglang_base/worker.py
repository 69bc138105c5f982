"""What stands between SGLang's model runner and CUDA, whichever its release. Importing this needs SGLang."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from overlap_bench.engines.pace import Size
from overlap_bench.engines.paced.device import Device, mean_context


class Model(torch.nn.Module):  # type: ignore[misc]
    """The model: its forward pass is a program of the clock. Its logits have one column, for the sampler to
    look at."""

    def __init__(self, card: Device) -> None:
        super().__init__()
        self.card = card

    def forward(self, input_ids: Any, positions: Any, batch: Any, **named: Any) -> Any:
        if not batch.forward_mode.is_decode():  # a decode is a replay
            self.card.prepared()
            self.card.forward()
        return LogitsProcessorOutput(next_token_logits=torch.zeros(batch.batch_size, 1))


class Unfilled:
    """Before SGLang's pool of KV slots: without their memory."""

    device: Any

    def _create_buffers(self) -> None:
        device, self.device = self.device, "meta"
        super()._create_buffers()  # type: ignore[misc]
        self.device = device


class Answering:
    """Before SGLang's model runner: its sampler runs, and the token is the one of `answers`, by a request's
    place in the pool and the position."""

    answers: Any

    def sample(self, logits_output: Any, batch: Any) -> Any:
        super().sample(logits_output, batch)  # type: ignore[misc]
        return self.answers[batch.req_pool_indices, batch.seq_lens]


def size_of(batch: Any, lengths: Any, captured: list[int]) -> Size:
    """Size of what a batch of these `lengths` computes; a decode is padded as its graph is."""
    rows, lengths = len(lengths), lengths.numpy()
    if batch.forward_mode.is_decode():
        padded = captured[bisect_left(captured, rows)]
        return Size("decode", padded, padded, mean_context(lengths, padded))
    return Size("prefill", rows, batch.extend_num_tokens, int(lengths.max()))
