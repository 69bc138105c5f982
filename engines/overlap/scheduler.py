"""Which requests run next, and what the device must be told to run them.

Knows requests and blocks; knows no device and no thread. Prefill goes first: a request that waits is worth
more than one more token of those that run. A request is admitted with all the blocks it can ever need, so
that none runs out in mid-flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from engines.overlap.kv_cache import BlockPool
from engines.overlap.layout import DUMMY_SLOT
from engines.overlap.request import Active
from engines.overlap.toggles.tables import Tables


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, immutable: whatever happens to the requests later, the step runs what stands here.

    `values` is what the device is told, by the names of layout.DTYPES; Python ints, except for the block
    tables, int32 [rows, blocks]. `rows` is the batch with its padding, `length` the padded prompt length of
    a prefill, `blocks` the padded number of blocks of a decode step. `changed_rows` is what has to change in
    the table that the device keeps: (slot, int32 [max blocks]); nothing with tables=full.
    """

    kind: str  # "prefill" or "decode"
    requests: tuple[Active, ...]
    rows: int
    length: int
    blocks: int
    values: dict[str, Sequence[int] | np.ndarray]
    changed_rows: Sequence[tuple[int, np.ndarray]] = ()

    @property
    def tokens(self) -> int:
        """Tokens fed to the model, padding included."""
        return self.rows * max(self.length, 1)

    @property
    def program(self) -> tuple[str, int, int]:
        """The program that runs it and its two arguments."""
        return (self.kind, self.rows, self.length if self.kind == "prefill" else self.blocks)


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_size: int
    prefill_max_batch_size: int
    prefill_max_tokens: int  # padded
    batch_buckets: tuple[int, ...]  # ascending; the last one is max_batch_size
    block_buckets: tuple[int, ...]  # ascending; the last one holds the longest request


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits, tables: Tables) -> None:
        self.pool = pool
        self.limits = limits
        self.tables = tables
        self.waiting: deque[Active] = deque()
        self.running: list[Active] = []
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self.padding_slot = limits.max_batch_size

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Active) -> None:
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        """The next step, its requests already counted as in flight; None when nothing can run now."""
        batch = self._prefill() or self._decode()
        if batch is not None:
            for request in batch.requests:
                request.scheduled += 1
                request.in_flight += 1
        return batch

    def append(self, batch: Batch, ids: Sequence[int], eos: frozenset[int]) -> list[tuple[Active, int]]:
        """Give each request of a finished step its token; (request, token) of those that wanted one.

        A request that ended while this step was in flight drops its token. Blocks and slot go back only when
        no launched step reads them any more: the next owner's first step would be overwritten otherwise.
        """
        appended = []
        for request, token in zip(batch.requests, ids, strict=False):  # ids has padding rows at its end
            request.in_flight -= 1
            if not request.finish_reason:
                request.tokens.append(token)
                if request.request.stop_on_eos and token in eos:
                    request.finish_reason = "eos"
                elif len(request.tokens) >= request.request.max_new_tokens:
                    request.finish_reason = "length"
                appended.append((request, token))
            if request.finish_reason and not request.in_flight:
                self._release(request)
        return appended

    def _release(self, request: Active) -> None:
        self.running.remove(request)
        self.pool.give_back(request.blocks)
        self._free_slots.append(request.slot)

    def _prefill(self) -> Batch | None:
        """Admit what waits, first come first served, up to the limits on requests, tokens and blocks."""
        limits, admitted, longest = self.limits, list[Active](), 0
        while self.waiting and self._free_slots and len(admitted) < limits.prefill_max_batch_size:
            request = self.waiting[0]
            length = max(longest, len(request.prompt))
            if admitted and length * (len(admitted) + 1) > limits.prefill_max_tokens:
                break
            needed = self.pool.blocks_for(len(request.prompt) + request.request.max_new_tokens)
            if needed > self.pool.free:
                break
            self.waiting.popleft()
            longest = length
            request.admitted_ns = perf_counter_ns()
            request.blocks = self.pool.take(needed)
            request.slot = self._free_slots.pop()
            self.tables.write(request.slot, request.blocks)
            admitted.append(request)
        if not admitted:
            return None
        self.running += admitted
        return prefill_batch(admitted, longest, self.pool.block_size)

    def _decode(self) -> Batch | None:
        """One more token for every running request that has use for one."""
        requests = [request for request in self.running if request.wants_step]
        if not requests:
            return None
        deepest = self.pool.blocks_for(max(request.context for request in requests))
        rows = next(bucket for bucket in self.limits.batch_buckets if bucket >= len(requests))
        blocks = next(bucket for bucket in self.limits.block_buckets if bucket >= deepest)
        return decode_batch(requests, rows, blocks, self.tables, self.pool.block_size, self.padding_slot)


def prefill_batch(requests: list[Active], length: int, block_size: int) -> Batch:
    """Whole prompts, padded on the right to `length`."""
    input_ids, slot_mapping = list[int](), list[int]()
    for request in requests:
        padding = length - len(request.prompt)
        input_ids += request.prompt + [0] * padding
        slot_mapping += [
            request.blocks[position // block_size] * block_size + position % block_size
            for position in range(len(request.prompt))
        ] + [DUMMY_SLOT] * padding
    values: dict[str, Sequence[int] | np.ndarray] = {
        "input_ids": input_ids,
        "position_ids": list(range(length)) * len(requests),
        "slot_mapping": slot_mapping,
        "context_lens": [len(request.prompt) for request in requests],
        "request_slots": [request.slot for request in requests],
    }
    return Batch("prefill", tuple(requests), len(requests), length, 0, values)


def decode_batch(
    requests: list[Active], rows: int, blocks: int, tables: Tables, block_size: int, padding_slot: int
) -> Batch:
    """The newest token of each request, padded to `rows`. A token that is still in flight is named by its
    place in the future map."""
    padding = [0] * (rows - len(requests))
    last = [request.context - 1 for request in requests]
    slots = [request.slot for request in requests] + [padding_slot] * len(padding)
    values: dict[str, Sequence[int] | np.ndarray] = {
        "input_ids": [-1 - each.slot if each.in_flight else each.tokens[-1] for each in requests] + padding,
        "position_ids": last + padding,
        "slot_mapping": [
            request.blocks[position // block_size] * block_size + position % block_size
            for request, position in zip(requests, last, strict=True)
        ]
        + [DUMMY_SLOT] * len(padding),
        "context_lens": [position + 1 for position in last] + [1] * len(padding),
        "request_slots": slots,
        **tables.whole(slots, blocks),
    }
    return Batch("decode", tuple(requests), rows, 0, blocks, values, tables.changed(slots))
