"""What runs on the device: a Hugging Face causal LM over a paged KV cache, as its programs.

`prefill(batch, length)` runs whole prompts, padded on the right to one length. `extend(batch, length,
blocks)` runs what is left of prompts after a cached prefix, over at most `blocks` KV blocks, the new tokens'
own included. `decode(batch, blocks)` runs one token per request (or several, one after another: toggle
steps), each over at most `blocks` KV blocks. `mixed` runs a token of some requests beside parts of the
prompts of others (toggle chunk). `verify(batch, blocks)` runs drafts behind the newest token of each
request, in place of `decode` (toggle spec). All end by sampling into `sampled_ids` and into the future map
(`verify` into each request's history instead, with its length), so that the next step can be launched before
the host knows the ids. Nothing here knows of streams, copies or the host. `place` says which rank of a model
this is that spans several devices (models/tensor_parallel.py); the KV cache then has that rank's heads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap.attention import Mixed, Paged, Pages, Prefill, slots_at
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.drafts import Drafts
from overlap_bench.engines.overlap.layout import DUMMY_SLOT, FAMILIES, Array, nbytes, program_name
from overlap_bench.engines.overlap.model_check import A_FEW_TOKENS, check_model
from overlap_bench.engines.overlap.models import open_model
from overlap_bench.engines.overlap.models.contract import Attend, Model
from overlap_bench.engines.overlap.models.tensor_parallel import Group, join
from overlap_bench.engines.overlap.plant import PROGRAM, delay_program
from overlap_bench.engines.overlap.sampler import sample, sample_greedy
from overlap_bench.engines.overlap.scoring import score
from overlap_bench.engines.overlap.toggles import spec
from overlap_bench.engines.overlap.toggles import steps as multi_step
from overlap_bench.engines.pace import Size
from overlap_bench.engines.presets import rescaling


class OverlapModule:
    """A model, its KV cache and its static buffers on one device (engines.devices.base.Module)."""

    def __init__(
        self, device: torch.device, config: ModelConfig, place: tuple[int, int, str] | None = None
    ) -> None:
        self.device, self.config = device, config
        dtype: torch.dtype = getattr(torch, config.dtype)
        self._model = _open(device, config, dtype, place)
        self.root = self._model.root
        self.shape = has = self._model.shape
        self._queries_per_head = has.heads // has.kv_heads
        kv_shape = (config.num_blocks, config.block_size, has.kv_heads, has.width)
        kv_bytes_per_token = 2 * has.layers * has.kv_heads * has.width * dtype.itemsize
        _check_room(device, config.num_blocks, config.num_blocks * config.block_size * kv_bytes_per_token)
        keys, values = ([self._zeros(*kv_shape, dtype=dtype) for _ in range(has.layers)] for _ in range(2))
        self.pages = Pages(keys, values, config.block_size)
        self.facts = {
            "vocabulary": has.vocabulary,
            "context": has.positions,
            "eos": list(has.eos),
            "parameters": sum(each.numel() for each in self.root.parameters()),
            "kv_bytes_per_token": kv_bytes_per_token,
            "largest_logit": self._few_logits().abs().max().item(),
        }

        slots = config.max_batch_size + 1  # one for each request; the last one is where padding rows write
        self.future = self._zeros(slots)  # the token that each is about to get
        self._history = Drafts(config, slots, device) if config.drafts else None
        ids = config.max_batch_size * (config.gives + (config.drafts > 0))  # with drafts, a count comes last
        self.sampled_ids = self._zeros(ids)
        self.buffers = {"sampled_ids": self.sampled_ids}
        if config.persistent_tables:
            self.buffers["block_tables"] = self._zeros(slots, config.block_buckets[-1], dtype=torch.int32)
        self._arrays = {name: self._lay_out(name, arrays) for name, arrays in config.layouts.items()}
        self.programs = self._named_programs()

        most = config.max_batch_size * config.block_buckets[-1]
        self._gathered = [self._zeros(most, *kv_shape[1:], dtype=dtype) for _ in range(2)]
        self._places = torch.arange(config.block_buckets[-1] * config.block_size, device=device)
        self._no_bias = self._zeros(dtype=dtype)
        self._masked = torch.full((), float("-inf"), dtype=dtype, device=device)

    def _named_programs(self) -> dict[str, Callable[..., None]]:
        """Each kind that the configuration calls for, in each family."""
        kinds: dict[str, Callable[..., None]] = {"prefill": self.prefill}
        kinds |= {"verify": self.verify} if self.config.drafts else {"decode": self.decode}
        if self.config.prefix_cache:
            kinds["extend"] = self.extend
        if self.config.chunk_tokens:
            kinds["mixed"] = self.mixed
        named: dict[str, Callable[..., None]] = {
            program_name(kind, family): partial(run, family=family)
            for kind, run in kinds.items()
            for family in self.config.families
        }
        return named | {PROGRAM: delay_program(self.device)}

    def sizes(self, program: str, *arguments: int) -> Sequence[Size]:
        """Rows and tokens of a step's program as it runs, padding included; a mixed one has both."""
        match program.partition("_")[0], arguments:
            case "decode", (batch, blocks):
                return [Size("decode", batch, batch, blocks * self.pages.block_size, self.config.steps)]
            case (("prefill" | "extend"), (batch, length, *_)):
                return [Size("prefill", batch, batch * length, length)]
            case "verify", (batch, blocks):
                rows = batch * self.config.gives
                # The rows of a request read its context once.
                context = blocks * self.pages.block_size // self.config.gives
                return [Size("decode", rows, rows, context)]
            case "mixed", (batch, reach, prompts, length, _):
                prefill = Size("prefill", prompts, prompts * length, length)
                decode = Size("decode", batch, batch, reach * self.pages.block_size)
                return [decode, prefill] if batch else [prefill]
        return []

    def _few_logits(self) -> Tensor:
        """Behind the last of a few tokens: [vocabulary]."""
        ids = torch.tensor([list(A_FEW_TOKENS)], device=self.device)
        nowhere = torch.full((ids.numel(),), DUMMY_SLOT, device=self.device)
        positions = torch.arange(ids.numel(), device=self.device)[None]
        hidden = self._model.hidden(ids, positions, Prefill(self.pages, nowhere))
        return self._model.logits(hidden)[0, -1]

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _lay_out(self, name: str, arrays: tuple[Array, ...]) -> dict[str, Tensor]:
        """A static metadata buffer, and the typed views of it that the program reads."""
        raw = self.buffers[name] = self._zeros(nbytes(arrays), dtype=torch.uint8)
        views: dict[str, Tensor] = {
            array.name: raw[array.offset : array.offset + array.nbytes].view(getattr(torch, array.dtype))
            for array in arrays
        }
        if "context_lens" in views:
            views["context_lens"].fill_(1)  # for warm-ups: a row must attend to something
        return views

    def prefill(self, batch: int, length: int, family: str = "greedy") -> None:
        """Run `batch` prompts of at most `length` tokens and sample the first token of each."""
        arrays = self._arrays[program_name("prefill", family)]
        work = Prefill(self.pages, arrays["slot_mapping"][: batch * length].to(torch.int64))
        self._run_prompts(arrays, batch, length, family, work, first=0)

    def extend(self, batch: int, length: int, blocks: int, family: str = "greedy") -> None:
        """Run at most `length` new tokens of each of `batch` requests, whose tokens, cached ones included,
        lie in at most `blocks` blocks, and sample the next token of each."""
        arrays = self._arrays[program_name("extend", family)]
        positions = arrays["position_ids"][: batch * length].view(batch, length)
        visible = self._places[: blocks * self.pages.block_size] <= positions[:, :, None]
        work = self._paged(
            arrays["slot_mapping"][: batch * length],
            arrays["block_tables"][: batch * blocks],
            visible.repeat(1, self._queries_per_head, 1),
        )
        self._run_prompts(arrays, batch, length, family, work, first=positions[:, 0])

    def _run_prompts(
        self,
        arrays: dict[str, Tensor],
        batch: int,
        length: int,
        family: str,
        work: Attend,
        first: Tensor | int,
    ) -> None:
        """`first`: the position of each one's first token."""
        ids, positions = (
            arrays[name][: batch * length].view(batch, length) for name in ("input_ids", "position_ids")
        )
        hidden = self._forward(ids, positions, work)
        last = arrays["context_lens"][:batch].to(torch.int64) - (first + 1)
        rows = torch.arange(batch, device=self.device)
        chosen = self._sample(hidden[rows, last], arrays, family, self.sampled_ids[:batch])
        if self._history is not None:
            self._history.begin(arrays, batch, length, chosen)

    def mixed(
        self, batch: int, reach: int, prompts: int, length: int, blocks: int, family: str = "greedy"
    ) -> None:
        """Run one token of each of `batch` requests, over at most `reach` blocks, and at most `length` tokens
        of each of `prompts` others, over at most `blocks`, and sample the next token of each."""
        arrays = self._arrays[program_name("mixed", family)]
        tokens, tabled = batch + prompts * length, batch * reach
        ids, positions, slots = (
            arrays[name][:tokens] for name in ("input_ids", "position_ids", "slot_mapping")
        )
        context_lens, tables = arrays["context_lens"], arrays["block_tables"]
        places = self._places
        decode = None
        if batch:
            visible = places[: reach * self.pages.block_size] < context_lens[:batch, None]
            decode = self._paged(slots[:batch], tables[:tabled], visible[:, None, :])
        at = positions[batch:].view(prompts, length)
        visible = places[: blocks * self.pages.block_size] <= at[:, :, None]
        parts = self._paged(
            slots[batch:],
            tables[tabled : tabled + prompts * blocks],
            visible.repeat(1, self._queries_per_head, 1),
        )
        hidden = self._forward(ids[None], positions[None], Mixed(decode, parts, batch, length))[0]
        last = context_lens[batch : batch + prompts].to(torch.int64) - 1 - at[:, 0]
        rows = torch.arange(prompts, device=self.device) * length + batch + last
        newest = torch.cat((torch.arange(batch, device=self.device), rows))
        self._sample(hidden[newest], arrays, family, self.sampled_ids[: batch + prompts])

    def decode(self, batch: int, blocks: int, family: str = "greedy") -> None:
        """Run `steps` tokens of each of `batch` requests that reach back at most `blocks` blocks, one after
        another."""
        arrays = self._arrays[f"{program_name('decode', family)}.{batch}.{blocks}"]
        tables = self._tables(arrays, blocks)
        block_size = self.pages.block_size
        place = multi_step.told(arrays)
        for number in range(self.config.steps):
            visible = self._places[: blocks * block_size] < place.context_lens[:, None]
            work = self._paged(place.slot_mapping, tables, visible[:, None, :])
            hidden = self._forward(place.input_ids[:, None], place.position_ids[:, None], work)
            sampled = self.sampled_ids[number * batch : (number + 1) * batch]
            told = arrays | {"context_lens": place.context_lens}
            chosen = self._sample(hidden[:, 0], told, family, sampled)
            if number + 1 < self.config.steps:
                kv_slots = partial(slots_at, tables=tables.view(batch, blocks), block_size=block_size)
                place = multi_step.next_place(place, chosen, kv_slots, self.shape.positions)

    def verify(self, batch: int, blocks: int, family: str = "greedy") -> None:
        """Run the newest token of each of `batch` requests and drafts behind it, over at most `blocks`
        blocks, and keep what the model says itself. Where all of this is, the device knows: the host learns
        only afterwards how many tokens each request got."""
        arrays = self._arrays[f"{program_name('verify', family)}.{batch}.{blocks}"]
        tables, block_size, length = self._tables(arrays, blocks), self.pages.block_size, self.config.gives
        request_slots = arrays["request_slots"].to(torch.int64)
        assert self._history is not None
        ids, at = self._history.propose(request_slots)
        visible = self._places[: blocks * block_size] <= at[:, :, None]
        work = self._paged(
            slots_at(at, tables.view(batch, blocks), block_size).view(-1),
            tables,
            visible.repeat(1, self._queries_per_head, 1),
        )
        hidden = self._forward(ids, at.clamp(max=self.shape.positions - 1), work).flatten(0, 1)
        told = {name: arrays[name].repeat_interleave(length) for name in FAMILIES[family]}
        told["context_lens"] = at.view(-1) + 1
        chosen = self._choose(hidden, told, family, torch.empty_like(at).view(-1)).view(batch, length)
        kept = spec.count_kept(chosen, ids[:, 1:])
        self.sampled_ids[: batch * length].view(length, batch).copy_(chosen.T)
        self.sampled_ids[batch * length : batch * (length + 1)] = kept
        self._history.keep(request_slots, at, chosen, kept)

    def _tables(self, arrays: dict[str, Tensor], blocks: int) -> Tensor:
        """int32 [batch * blocks]: sent with the step, or gathered from the rows that stay here."""
        if "block_tables" in arrays:
            return arrays["block_tables"]
        rows = self.buffers["block_tables"][:, :blocks]
        return rows.index_select(0, arrays["request_slots"]).view(-1)

    def _paged(self, slots: Tensor, tables: Tensor, visible: Tensor) -> Paged:
        """`visible`: bool [batch, queries, blocks * block_size]."""
        return Paged(
            self.pages,
            slots=slots.to(torch.int64),
            tables=tables,
            bias=torch.where(visible, self._no_bias, self._masked)[:, None],
            gathered=(self._gathered[0][: len(tables)], self._gathered[1][: len(tables)]),
        )

    def _forward(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        """Hidden states [batch, length, hidden]. An id of -1 - slot stands for that slot's future token."""
        slots = (-1 - input_ids).clamp_(min=0)
        ids = torch.where(input_ids < 0, self.future[slots], input_ids)
        return self._model.hidden(ids, position_ids, work)

    def _sample(self, hidden: Tensor, arrays: dict[str, Tensor], family: str, sampled: Tensor) -> Tensor:
        """The next token of each row of [batch, hidden], into `sampled` and the future map; those that the
        rows go on with."""
        chosen = self._choose(hidden, arrays, family, sampled)
        self.future.index_copy_(0, arrays["request_slots"][: len(hidden)].to(torch.int64), chosen)
        return chosen

    def _choose(self, hidden: Tensor, arrays: dict[str, Tensor], family: str, sampled: Tensor) -> Tensor:
        batch = len(hidden)
        logits = self._model.logits(hidden)
        parameters = {name: arrays[name][:batch] for name in FAMILIES[family]}
        if family == "scored":
            return score(logits, out=sampled, **parameters)
        if parameters:
            sample(logits, out=sampled, positions=arrays["context_lens"][:batch], **parameters)
        else:
            sample_greedy(logits, out=sampled)
        return sampled


def _open(
    device: torch.device, config: ModelConfig, dtype: torch.dtype, place: tuple[int, int, str] | None
) -> Model:
    """The model, or one rank's part of it. Raises BadSetting for one that can't run so."""
    group = Group(*place[:2]) if place else None
    model = open_model(config.model, dtype, device, config.seed, group)
    if place and group:
        join(device, group, place[2])  # what can't be divided was refused by now, without waiting for anyone
    has, name = model.shape, config.model
    if config.max_context > has.positions:
        raise BadSetting(f"{name} has {has.positions} positions: set max_context to that or less")
    if has.window and has.window < config.max_context:
        raise BadSetting(f"{name} looks back {has.window} tokens only: set max_context to that or less")
    if has.rescaled and has.rescaled < config.max_context:
        raise BadSetting(rescaling(name, has.rescaled))
    check_model(name, model, dtype, device, config.max_context)
    return model


def _check_room(device: torch.device, blocks: int, wanted: int) -> None:
    """Raises BadSetting for a KV cache that no device of this size could hold, whatever else is on it."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > there:
        raise BadSetting(
            f"a KV cache of {blocks:,} blocks takes {wanted / 2**30:,.0f} GiB, and the device has "
            f"{there / 2**30:,.0f}: set num_blocks, or a smaller max_batch_size or max_context"
        )


def build(device: torch.device, config: dict[str, Any], place: Any = None) -> OverlapModule:
    """What the device calls to load the module (engines.devices.base.ModuleSpec)."""
    return OverlapModule(device, msgspec.convert(config, ModelConfig), place and tuple(place))
