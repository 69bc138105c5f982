"""Attention over a paged KV cache: of whole prompts, and of steps that have a past."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, cat, index_select
from torch.nn.functional import scaled_dot_product_attention

from overlap_bench.engines.overlap.layout import DUMMY_SLOT


@dataclass(slots=True)
class Pages:
    """The KV cache: per layer keys and values [blocks, block_size, kv_heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int


@dataclass(slots=True)
class Prefill:
    """What attention needs of a prefill: where to put each token, int64 [batch * length]."""

    pages: Pages
    slots: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention over the prompt itself. Right padding is never looked at by a real token."""
        _store(self.pages, layer, self.slots, key, value)
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)


@dataclass(slots=True)
class Paged:
    """What attention needs of a step with a past: of decode, where `length` is 1, and of extend.

    slots: int64 [batch * length]; tables: int32 [batch * blocks]; gathered: two buffers [batch * blocks,
    block_size, kv_heads, head_dim], static, since a fresh allocation of that size in each layer costs more
    than the gather. bias: [batch, 1, length * queries per KV head, blocks * block_size], the queries of one
    head one after another, 0 where a query looks and -inf where not; a single row where all look at the same.
    """

    pages: Pages
    slots: Tensor
    tables: Tensor
    bias: Tensor
    gathered: tuple[Tensor, Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Queries over their request's blocks. Query heads that share a KV head become rows of one matrix,
        which keeps SDPA off its slow path for masked grouped-query attention."""
        _store(self.pages, layer, self.slots, key, value)
        batch, heads, length, width = query.shape
        kv_heads = key.shape[1]
        keys, values = (
            index_select(cache[layer], 0, self.tables, out=buffer)
            .view(batch, -1, kv_heads, width)
            .transpose(1, 2)
            for cache, buffer in zip((self.pages.keys, self.pages.values), self.gathered, strict=True)
        )
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * length, width)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self.bias, scale=scale)
        return out.reshape(batch, heads, length, width).transpose(1, 2)


@dataclass(slots=True)
class Mixed:
    """What attention needs of a mixed step, all of whose tokens are one row: `rows` that decode, then parts
    of prompts, [prompts, length] of them."""

    decode: Paged | None  # None: nobody decodes
    prompts: Paged
    rows: int
    length: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Each kind over its own blocks, the decoding rows one query each."""
        both = query, key, value  # [1, heads, tokens, width] each
        parts = [each[0, :, self.rows :].unflatten(1, (-1, self.length)).transpose(0, 1) for each in both]
        attended = self.prompts.attend(layer, parts[0], parts[1], parts[2], scale).flatten(0, 1)
        if self.decode is not None:
            rows = [each[0, :, : self.rows].transpose(0, 1)[:, :, None] for each in both]
            decoded = self.decode.attend(layer, rows[0], rows[1], rows[2], scale).flatten(0, 1)
            attended = cat((decoded, attended))
        return attended[None]


def slots_at(positions: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """Where keys and values of these positions go, by each row's blocks. positions: int64 [batch, length];
    tables: int32 [batch, blocks], 0 behind a row's own. What lies beyond them goes to the dummy block."""
    column = positions // block_size
    beyond = column >= tables.shape[1]
    block = tables.gather(1, column.masked_fill(beyond, 0))
    return (block * block_size + positions % block_size).masked_fill_(beyond, DUMMY_SLOT)


def _store(pages: Pages, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys and values [batch, kv_heads, length, head_dim] to their slots."""
    for cache, new in ((pages.keys[layer], key), (pages.values[layer], value)):
        flat = new.transpose(1, 2).reshape(-1, *cache.shape[2:])
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, flat)
