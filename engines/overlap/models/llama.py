"""Llama: rotary positions, RMS norms in front, grouped queries, a gated MLP.

Parameters are named as in the published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from overlap_bench.engines.overlap.models.contract import Attend, Shape
from overlap_bench.engines.overlap.models.layers import Embedding, Linear
from overlap_bench.engines.overlap.models.tensor_parallel import COLUMNS, ROWS

EPSILON = 1e-6
THETA = 10_000.0  # of the rotary positions
PLAN = {  # of several ranks
    "layers.*.self_attn.[qkv]_proj": COLUMNS,
    "layers.*.self_attn.o_proj": ROWS,
    "layers.*.mlp.gate_proj": COLUMNS,
    "layers.*.mlp.up_proj": COLUMNS,
    "layers.*.mlp.down_proj": ROWS,
}


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """In float32, whatever the model's dtype is."""
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.q_proj = Linear(hidden, heads * self.width, bias=False)
        self.k_proj = Linear(hidden, kv_heads * self.width, bias=False)
        self.v_proj = Linear(hidden, kv_heads * self.width, bias=False)
        self.o_proj = Linear(heads * self.width, hidden, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], layer: int, work: Attend) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.width).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = work.attend(layer, rotate(query, *turns), rotate(key, *turns), value, None)
        out: Tensor = self.o_proj(attended.reshape(batch, length, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, width]; the halves of a head are its pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, hidden: int, between: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, between, bias=False)
        self.up_proj = Linear(hidden, between, bias=False)
        self.down_proj = Linear(between, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, hidden: int, between: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, heads, kv_heads)
        self.mlp = MLP(hidden, between)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], layer: int, work: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns, layer, work)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """From ids to what the output's weights are applied to."""

    def __init__(
        self, layers: int, hidden: int, between: int, heads: int, kv_heads: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, between, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(hidden)

    def forward(self, input_ids: Tensor, turns: tuple[Tensor, Tensor], work: Attend) -> Tensor:
        x = self.embed_tokens(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, turns, number, work)
        out: Tensor = self.norm(x)
        return out


class Llama:
    """engines.overlap.models.contract.Model, by transformers' names for what it is made of."""

    plan = PLAN

    def __init__(
        self, *, num_hidden_layers: int, hidden_size: int, intermediate_size: int, num_attention_heads: int,
        num_key_value_heads: int, max_position_embeddings: int, vocab_size: int, eos_token_id: int, **_: Any,
    ) -> None:  # fmt: skip
        self.base = Decoder(
            num_hidden_layers,
            hidden_size,
            intermediate_size,
            num_attention_heads,
            num_key_value_heads,
            vocab_size,
        )
        self._output = Linear(hidden_size, vocab_size, bias=False)
        self.root: nn.Module = nn.ModuleDict({"model": self.base, "lm_head": self._output})
        self.shape = Shape(
            layers=num_hidden_layers,
            heads=num_attention_heads,
            kv_heads=num_key_value_heads,
            width=hidden_size // num_attention_heads,
            vocabulary=vocab_size,
            positions=max_position_embeddings,
            eos=(eos_token_id,),
        )

    def prepare(self, device: torch.device) -> None:
        """The rotary turn of each position, float32 until a step takes it: [positions, width] each."""
        pairs = torch.arange(0, self.shape.width, 2, dtype=torch.float32, device=device)
        places = torch.arange(self.shape.positions, dtype=torch.float32, device=device)
        angles = torch.outer(places, THETA ** -(pairs / self.shape.width))
        both = torch.cat((angles, angles), dim=-1)
        dtype = self._output.weight.dtype
        self._cos, self._sin = both.cos().to(dtype), both.sin().to(dtype)

    def reference(self, input_ids: Tensor) -> None:
        """It is written here."""

    def hidden(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        turns = (self._cos[position_ids][:, None], self._sin[position_ids][:, None])
        out: Tensor = self.base(input_ids, turns, work)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._output(hidden)
        return out
