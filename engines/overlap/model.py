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

import torch
from torch import Tensor

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap.attention import Mixed, Paged, Pages, Prefill, slots_at
from overlap_bench.engines.overlap.layout import (
    DUMMY_SLOT,
    FAMILIES,
    Array,
    lay_out_all,
    nbytes,
    program_name,
)
from overlap_bench.engines.overlap.model_check import A_FEW_TOKENS, check_model
from overlap_bench.engines.overlap.models import open_model
from overlap_bench.engines.overlap.models.contract import Attend
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
        self,
        device: torch.device,
        *,
        model: str,
        dtype: str,
        seed: int,
        max_batch_size: int,
        prefill_max_batch_size: int,
        prefill_max_tokens: int,
        max_context: int,
        num_blocks: int,
        block_size: int,
        decode_shapes: list[list[int]],
        prefix_cache: bool,
        families: list[str],
        persistent_tables: bool,
        steps: int,
        chunk_tokens: int,
        drafts: int,
        place: list[Any] | None = None,
    ) -> None:
        torch_dtype = getattr(torch, dtype)
        self.device = device
        if place:
            rank, ranks, store = place
            group = Group(rank, ranks)
            self._model = open_model(model, torch_dtype, device, seed, group)
            join(device, group, store)  # what can't be divided was refused by now, without waiting for anyone
        else:
            self._model = open_model(model, torch_dtype, device, seed)
        self.root = self._model.root
        has = self._model.shape
        self.layers = has.layers
        self.queries_per_head = has.heads // has.kv_heads
        self.steps = steps
        self.positions = has.positions
        shape = (num_blocks, block_size, has.kv_heads, has.width)
        if max_context > has.positions:
            raise BadSetting(f"{model} has {has.positions} positions: set max_context to that or less")
        if has.window and has.window < max_context:
            raise BadSetting(f"{model} looks back {has.window} tokens only: set max_context to that or less")
        if has.rescaled and has.rescaled < max_context:
            raise BadSetting(rescaling(model, has.rescaled))
        check_model(model, self._model, torch_dtype, device, max_context)
        kv_bytes_per_token = 2 * has.layers * has.kv_heads * has.width * torch_dtype.itemsize
        _check_room(device, num_blocks, num_blocks * block_size * kv_bytes_per_token)
        keys, values = (self._zeros_per_layer(shape, torch_dtype) for _ in range(2))
        self.pages = Pages(keys, values, block_size)
        self.facts = {
            "vocabulary": has.vocabulary,
            "context": has.positions,
            "eos": list(has.eos),
            "parameters": sum(each.numel() for each in self.root.parameters()),
            "kv_bytes_per_token": kv_bytes_per_token,
            "largest_logit": self._few_logits().abs().max().item(),
        }

        # One future token per request slot; the last entry is where padding rows write.
        self.future = torch.zeros(max_batch_size + 1, dtype=torch.int64, device=device)
        if (
            drafts
        ):  # what each slot's request has said so far, and how much of it: the padding slot comes last
            width = max_context + 2 * (drafts + 1) + 1  # a step under way may run past the end once more
            self.history = torch.zeros(max_batch_size + 1, width, dtype=torch.int64, device=device)
            self.lengths = torch.ones(max_batch_size + 1, dtype=torch.int64, device=device)
        self.drafts = drafts
        rows = max(prefill_max_batch_size, *(batch for batch, _ in decode_shapes))
        ids = rows * (drafts + 2) if drafts else rows * steps  # with drafts, a count for each row comes last
        self.sampled_ids = torch.zeros(ids, dtype=torch.int64, device=device)
        self.buffers = {"sampled_ids": self.sampled_ids}
        self._arrays: dict[str, dict[str, Tensor]] = {}
        most_blocks = max(blocks for _, blocks in decode_shapes)
        gathered = max(batch * blocks for batch, blocks in decode_shapes)
        self._gathered = [
            torch.zeros(gathered, *shape[1:], dtype=torch_dtype, device=device) for _ in range(2)
        ]
        kinds: dict[str, Callable[..., None]] = {"prefill": self.prefill}
        kinds |= {"verify": self.verify} if drafts else {"decode": self.decode}
        if prefix_cache:
            kinds["extend"] = self.extend
        if chunk_tokens:
            kinds["mixed"] = self.mixed
        self.programs: dict[str, Callable[..., None]] = {
            program_name(kind, family): partial(run, family=family)
            for kind, run in kinds.items()
            for family in families
        }
        self.programs[PROGRAM] = delay_program(device)
        layouts = lay_out_all(
            prefill_max_tokens=prefill_max_tokens,
            prefill_max_batch_size=prefill_max_batch_size,
            decode_shapes=decode_shapes,
            prefix_cache=prefix_cache,
            families=families,
            persistent_tables=persistent_tables,
            chunk_tokens=chunk_tokens,
            drafts=drafts > 0,
        )
        for name, arrays in layouts.items():
            self._add_metadata(name, arrays)
        if persistent_tables:  # a row per request slot; the last one is padding's
            table = (max_batch_size + 1, most_blocks)
            self.buffers["block_tables"] = torch.zeros(table, dtype=torch.int32, device=device)
        self._places = torch.arange(most_blocks * block_size, device=device)
        self._no_bias = torch.zeros((), dtype=torch_dtype, device=device)
        self._masked = torch.full((), float("-inf"), dtype=torch_dtype, device=device)

    def sizes(self, program: str, *arguments: int) -> Sequence[Size]:
        """Rows and tokens of a step's program as it runs, padding included; a mixed one has both."""
        match program.partition("_")[0], arguments:
            case "decode", (batch, blocks):
                return [Size("decode", batch, batch, blocks * self.pages.block_size, self.steps)]
            case (("prefill" | "extend"), (batch, length, *_)):
                return [Size("prefill", batch, batch * length, length)]
            case "verify", (batch, blocks):
                rows = batch * (self.drafts + 1)
                return [Size("decode", rows, rows, blocks * self.pages.block_size)]
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

    def _zeros_per_layer(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.layers)]

    def _add_metadata(self, name: str, arrays: tuple[Array, ...]) -> None:
        """A static metadata buffer, and the typed views of it that the program reads."""
        raw = torch.zeros(nbytes(arrays), dtype=torch.uint8, device=self.device)
        self.buffers[name] = raw
        self._arrays[name] = {
            array.name: raw[array.offset : array.offset + array.nbytes].view(getattr(torch, array.dtype))
            for array in arrays
        }
        if "context_lens" in self._arrays[name]:
            self._arrays[name]["context_lens"].fill_(1)  # for warm-ups: a row must attend to something

    def prefill(self, batch: int, length: int, family: str = "greedy") -> None:
        """Run `batch` prompts of at most `length` tokens and sample the first token of each."""
        tokens = batch * length
        arrays = self._arrays[program_name("prefill", family)]
        work = Prefill(self.pages, arrays["slot_mapping"][:tokens].to(torch.int64))
        hidden = self._forward(
            arrays["input_ids"][:tokens].view(batch, length),
            arrays["position_ids"][:tokens].view(batch, length),
            work,
        )
        last = arrays["context_lens"][:batch].to(torch.int64) - 1
        rows = torch.arange(batch, device=self.device)
        chosen = self._sample(hidden[rows, last], arrays, family, self.sampled_ids[:batch])
        self._remember(arrays, batch, length, chosen)

    def extend(self, batch: int, length: int, blocks: int, family: str = "greedy") -> None:
        """Run at most `length` new tokens of each of `batch` requests, whose tokens, cached ones included,
        lie in at most `blocks` blocks, and sample the next token of each."""
        tokens = batch * length
        arrays = self._arrays[program_name("extend", family)]
        positions = arrays["position_ids"][:tokens].view(batch, length)
        visible = self._places[: blocks * self.pages.block_size] <= positions[:, :, None]
        work = self._paged(
            arrays["slot_mapping"][:tokens],
            arrays["block_tables"][: batch * blocks],
            visible.repeat(1, self.queries_per_head, 1),
        )
        hidden = self._forward(arrays["input_ids"][:tokens].view(batch, length), positions, work)
        last = arrays["context_lens"][:batch].to(torch.int64) - 1 - positions[:, 0]
        rows = torch.arange(batch, device=self.device)
        chosen = self._sample(hidden[rows, last], arrays, family, self.sampled_ids[:batch])
        self._remember(arrays, batch, length, chosen)

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
            visible.repeat(1, self.queries_per_head, 1),
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
        for number in range(self.steps):
            visible = self._places[: blocks * block_size] < place.context_lens[:, None]
            work = self._paged(place.slot_mapping, tables, visible[:, None, :])
            hidden = self._forward(place.input_ids[:, None], place.position_ids[:, None], work)
            sampled = self.sampled_ids[number * batch : (number + 1) * batch]
            told = arrays | {"context_lens": place.context_lens}
            chosen = self._sample(hidden[:, 0], told, family, sampled)
            if number + 1 < self.steps:
                kv_slots = partial(slots_at, tables=tables.view(batch, blocks), block_size=block_size)
                place = multi_step.next_place(place, chosen, kv_slots, self.positions)

    def verify(self, batch: int, blocks: int, family: str = "greedy") -> None:
        """Run the newest token of each of `batch` requests and drafts behind it, over at most `blocks`
        blocks, and keep what the model says itself. Where all of this is, the device knows: the host learns
        only afterwards how many tokens each request got."""
        arrays = self._arrays[f"{program_name('verify', family)}.{batch}.{blocks}"]
        tables, block_size, length = self._tables(arrays, blocks), self.pages.block_size, self.drafts + 1
        request_slots = arrays["request_slots"].to(torch.int64)
        known, last = self.lengths[request_slots], self.history.shape[1] - 1
        history = self.history[request_slots]
        drafts = spec.propose(history, known)
        ids = torch.cat((history.gather(1, (known - 1)[:, None]), drafts), 1)
        offsets = torch.arange(length, device=self.device)
        at = (known - 1)[:, None] + offsets
        visible = self._places[: blocks * block_size] <= at[:, :, None]
        work = self._paged(
            slots_at(at, tables.view(batch, blocks), block_size).view(-1),
            tables,
            visible.repeat(1, self.queries_per_head, 1),
        )
        hidden = self._forward(ids, at.clamp(max=self.positions - 1), work).flatten(0, 1)
        told = {name: arrays[name].repeat_interleave(length) for name in FAMILIES[family]}
        told["context_lens"] = at.view(-1) + 1
        chosen = self._choose(hidden, told, family, torch.empty_like(at).view(-1)).view(batch, length)
        kept = spec.count_kept(chosen, drafts)
        self.sampled_ids[: batch * length].view(length, batch).copy_(chosen.T)
        self.sampled_ids[batch * length : batch * (length + 1)] = kept
        self.history.index_put_((request_slots[:, None], known[:, None] + offsets), chosen)
        # Padding rows, and a request that has ended, go on: they stay where there is room for a step.
        self.lengths.index_copy_(0, request_slots, (known + kept).clamp(max=last - length))

    def _remember(self, arrays: dict[str, Tensor], batch: int, length: int, chosen: Tensor) -> None:
        """Under speculation: the prompts of a prefill, and the token that each went on with. Of a cached
        prefix nothing is told, so what its slot held before stays: worse drafts, and no wrong token."""
        if not self.drafts:
            return
        slots, known = (arrays[name][:batch].to(torch.int64) for name in ("request_slots", "context_lens"))
        positions = arrays["position_ids"][: batch * length].view(batch, length)
        ids = arrays["input_ids"][: batch * length].view(batch, length)
        column = positions[:, :1] + torch.arange(length, device=self.device)
        trash = torch.full_like(column, self.history.shape[1] - 1)  # where padding goes: nobody gets that far
        self.history.index_put_((slots[:, None], column.where(column < known[:, None], trash)), ids)
        self.history.index_put_((slots, known), chosen)
        self.lengths.index_copy_(0, slots, known + 1)

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


def build(device: torch.device, **arguments: Any) -> OverlapModule:
    """What the device calls to load the module (engines.devices.base.ModuleSpec)."""
    return OverlapModule(device, **arguments)
