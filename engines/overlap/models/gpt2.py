"""GPT-2: learned positions, layer norms in front, one matrix for queries, keys and values.

Parameters are named as in the published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from overlap_bench.engines.overlap.models.contract import Attend, Shape
from overlap_bench.engines.overlap.models.layers import Embedding
from overlap_bench.engines.overlap.models.tensor_parallel import COLUMNS, FUSED, ROWS

EPSILON = 1e-5
PLAN = {  # of several ranks
    "h.*.attn.c_attn": FUSED,
    "h.*.attn.c_proj": ROWS,
    "h.*.mlp.c_fc": COLUMNS,
    "h.*.mlp.c_proj": ROWS,
}


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out], as GPT-2's are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.c_attn = Conv1D(hidden, 3 * hidden)
        self.c_proj = Conv1D(hidden, hidden)

    def forward(self, x: Tensor, layer: int, work: Attend) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            each.view(batch, length, -1, self.width).transpose(1, 2)
            for each in self.c_attn(x).chunk(3, dim=2)
        )
        attended = work.attend(layer, query, key, value, None)
        out: Tensor = self.c_proj(attended.reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = Conv1D(hidden, 4 * hidden)
        self.c_proj = Conv1D(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=EPSILON)
        self.attn = Attention(hidden, heads)
        self.ln_2 = nn.LayerNorm(hidden, eps=EPSILON)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor, layer: int, work: Attend) -> Tensor:
        x = x + self.attn(self.ln_1(x), layer, work)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Transformer(nn.Module):
    """Everything: the embeddings are also the output's weights."""

    def __init__(self, layers: int, hidden: int, heads: int, positions: int, vocabulary: int) -> None:
        super().__init__()
        self.wte = Embedding(vocabulary, hidden)
        self.wpe = Embedding(positions, hidden)
        self.h = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, eps=EPSILON)

    def forward(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        x = self.wte(input_ids) + self.wpe(position_ids)
        for layer, block in enumerate(self.h):
            x = block(x, layer, work)
        out: Tensor = self.ln_f(x)
        return out


class GPT2:
    """engines.overlap.models.contract.Model, by transformers' names for what it is made of."""

    plan = PLAN

    def __init__(
        self, *, n_layer: int, n_embd: int, n_head: int, n_positions: int, vocab_size: int,
        eos_token_id: int, **_: Any,
    ) -> None:  # fmt: skip
        self.base = Transformer(n_layer, n_embd, n_head, n_positions, vocab_size)
        self.root: nn.Module = nn.ModuleDict({"transformer": self.base})
        self.shape = Shape(
            layers=n_layer,
            heads=n_head,
            kv_heads=n_head,
            width=n_embd // n_head,
            vocabulary=vocab_size,
            positions=n_positions,
            eos=(eos_token_id,),
        )

    def prepare(self, device: torch.device) -> None:
        """It has nothing besides its weights."""

    def reference(self, input_ids: Tensor) -> None:
        """It is written here."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        out: Tensor = self.base(input_ids, position_ids, work)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.base.wte.weight)
