"""One step's work: the program that runs it, and what that is told of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_bench.engines.overlap.layout import DUMMY_SLOT
from overlap_bench.engines.overlap.programs import Decode, Extend, Mixed, Prefill, Program
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.toggles.tables import Tables

Values = Sequence[int] | Sequence[float] | np.ndarray
Chunk = tuple[Active, int]  # a request, and how many tokens of its prompt a step takes


@dataclass(frozen=True, slots=True)
class Batch:
    """Immutable: whatever happens to the requests later, the step runs what is written here.

    `values` is what the program is told, by the names of layout.DTYPES; Python numbers, except for the block
    tables, int32 [rows, blocks]. `changed_rows` is what has to change in the table that the device keeps:
    (slot, int32 [max blocks]); nothing with tables=full. The last `unfinished` requests are given nothing:
    their prompts go on in a later step. `cached_tokens` were found in the prefix cache, not prefilled;
    `preempted` requests lost their blocks to make room.
    """

    program: Program
    requests: tuple[Active, ...]
    values: dict[str, Values]
    changed_rows: Sequence[tuple[int, np.ndarray]] = ()
    unfinished: int = 0
    cached_tokens: int = 0
    preempted: int = 0

    @property
    def given(self) -> tuple[Active, ...]:
        """The requests that it gives a token. What an unfinished prompt's row samples reaches nobody: toggle
        chunk's guard."""
        return self.requests[: len(self.requests) - self.unfinished]

    @property
    def sampled(self) -> int:
        """How many ids come back: [gives, rows], padding included; where they are counted, a count for each
        row behind them."""
        return (self.program.gives + self.program.counted) * self.program.rows


def prefill_batch(requests: list[Active], length: int, tables: Tables, block_size: int) -> Batch:
    """Prompts behind what of them is cached, and the tokens so far of requests that were preempted, padded on
    the right to `length`."""
    rows, cached = len(requests), [each.cached_blocks * block_size for each in requests]
    parts = [(each, first, each.context) for each, first in zip(requests, cached, strict=True)]
    values: dict[str, Values] = {**_new_tokens(parts, length, block_size)}
    if not any(cached):
        return Batch(Prefill(rows, length), tuple(requests), values)
    blocks = max(len(request.blocks) for request in requests)
    values["block_tables"] = tables.read([request.slot for request in requests], blocks)
    return Batch(Extend(rows, length, blocks), tuple(requests), values, cached_tokens=sum(cached))


def mixed_batch(decoding: list[Active], chunks: list[Chunk], tables: Tables, block_size: int) -> Batch:
    """Rows that decode, then parts of prompts. A part has `left` tokens to go, and begins where they do."""
    length = max(count for _, count in chunks)
    firsts = [each.context - each.left for each, _ in chunks]
    parts = [(each, first, first + count) for (each, count), first in zip(chunks, firsts, strict=True)]
    reach = max((-(-each.context // block_size) for each in decoding), default=0)
    blocks = max(-(-end // block_size) for _, _, end in parts)
    newest, prompts = _newest_tokens(decoding, block_size), _new_tokens(parts, length, block_size)
    values: dict[str, Values] = {name: newest[name] + prompts[name] for name in newest}
    slots = [each.slot for each in decoding], [each.slot for each, _ in chunks]
    reached = tables.read(slots[0], reach), tables.read(slots[1], blocks)
    values["block_tables"] = np.concatenate([each.ravel() for each in reached])
    begun = [each for each, first, _ in parts if first == each.cached_blocks * block_size]
    return Batch(
        Mixed(len(decoding), reach, len(chunks), length, blocks),
        (*decoding, *(each for each, _ in chunks)),
        values,
        cached_tokens=sum(each.cached_blocks for each in begun) * block_size,
    )


def decode_batch(requests: list[Active], program: Decode, tables: Tables, block_size: int) -> Batch:
    """The newest token of each request, padded to the program's rows. Where it verifies drafts, the device
    knows which tokens these are, and where; it is told who and where their blocks are."""
    told = _slots_of(requests) if program.counted else _newest_tokens(requests, block_size)
    empty = {"slot_mapping": DUMMY_SLOT, "context_lens": 1, "request_slots": tables.padding_slot}
    padding = program.rows - len(requests)
    padded = {name: each + [empty.get(name, 0)] * padding for name, each in told.items()}
    slots = padded["request_slots"]
    values: dict[str, Values] = {**padded, **tables.whole(slots, program.blocks)}
    return Batch(program, tuple(requests), values, tables.changed(slots))


def _new_tokens(parts: list[tuple[Active, int, int]], length: int, block_size: int) -> dict[str, list[int]]:
    """What a step is told of parts (request, first token, the one behind the last), a row each."""
    input_ids, position_ids, slot_mapping = list[int](), list[int](), list[int]()
    for request, first, end in parts:
        padding = length - (end - first)
        input_ids += (request.prompt + request.tokens)[first:end] + [0] * padding
        position_ids += [*range(first, end), *([0] * padding)]
        slot_mapping += [
            request.blocks[position // block_size] * block_size + position % block_size
            for position in range(first, end)
        ] + [DUMMY_SLOT] * padding
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "slot_mapping": slot_mapping,
        "context_lens": [end for _, _, end in parts],
        "request_slots": [request.slot for request, _, _ in parts],
    }


def _newest_tokens(requests: list[Active], block_size: int) -> dict[str, list[int]]:
    """What a step is told of the newest token of each request. One that is still in flight is named by its
    place in the future map."""
    last = [request.context - 1 for request in requests]
    return {
        "input_ids": [-1 - each.slot if each.in_flight else each.tokens[-1] for each in requests],
        "position_ids": last,
        "slot_mapping": [
            request.blocks[position // block_size] * block_size + position % block_size
            for request, position in zip(requests, last, strict=True)
        ],
        "context_lens": [request.context for request in requests],
        **_slots_of(requests),
    }


def _slots_of(requests: list[Active]) -> dict[str, list[int]]:
    return {"request_slots": [request.slot for request in requests]}
