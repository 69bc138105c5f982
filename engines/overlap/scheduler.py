"""Which requests run next, and what the device must be told to run them.

Knows requests and blocks; knows no device and no thread. Prefill goes first: starting a waiting request is
worth more than one more token for the running ones.

A request takes blocks as it grows. When they run out, the youngest running request is preempted: it goes
back to the front of the queue, and is prefilled again later with all its tokens so far. None is preempted
while a step is in flight: the device may still read its blocks, and a step that ends may give some back. So
the oldest request always makes progress, and a request that fits alone always finishes.

With a prefix cache, full blocks are kept once the ids in them are on the host, and a request that begins with
kept blocks is prefilled from the token after them. At least its last token is prefilled: the next one is
sampled from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns

import numpy as np

from engines.overlap.kv_cache import NO_KEY, BlockPool, block_key
from engines.overlap.layout import DUMMY_SLOT, FAMILIES, NO_TARGET, program_name
from engines.overlap.request import NO_SLOT, Active
from engines.overlap.scoring import scores
from engines.overlap.toggles.tables import Tables

Values = Sequence[int] | Sequence[float] | np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, immutable: whatever happens to the requests later, the step runs what is written here.

    `values` is what the device is told, by the names of layout.DTYPES; Python numbers, except for the block
    tables, int32 [rows, blocks]. `rows` is the batch with its padding, `length` the padded number of new
    tokens of a prefill, `blocks` the padded number of blocks that a decode step reads, or a prefill after a
    cached prefix. `changed_rows` is what has to change in the table that the device keeps: (slot, int32 [max
    blocks]); nothing with tables=full. `family` is how tokens are chosen (layout.FAMILIES). `cached_tokens`
    were found in the prefix cache, not prefilled; `preempted` requests lost their blocks to make room.
    """

    kind: str  # "prefill" or "decode"
    requests: tuple[Active, ...]
    rows: int
    length: int
    blocks: int
    values: dict[str, Values]
    changed_rows: Sequence[tuple[int, np.ndarray]] = ()
    cached_tokens: int = 0
    preempted: int = 0
    family: str = "greedy"

    @property
    def tokens(self) -> int:
        """Tokens fed to the model, padding included."""
        return self.rows * max(self.length, 1)

    @property
    def program(self) -> tuple[str, *tuple[int, ...]]:
        """The program that runs it and its arguments."""
        if self.kind == "decode":
            return (program_name("decode", self.family), self.rows, self.blocks)
        if self.blocks:
            return (program_name("extend", self.family), self.rows, self.length, self.blocks)
        return (program_name("prefill", self.family), self.rows, self.length)


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_size: int
    prefill_max_batch_size: int
    prefill_max_tokens: int  # padded; a preempted request may have more, and then runs alone
    batch_buckets: tuple[int, ...]  # ascending; the last one is max_batch_size
    block_buckets: tuple[int, ...]  # ascending; the last one holds the longest request


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        tables: Tables,
        prefix_cache: bool = False,
        sampling: bool = False,
        scoring: bool = False,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.tables = tables
        self.prefix_cache = prefix_cache
        self.sampling = sampling  # whether a request may ask for a temperature
        self.scoring = scoring  # whether a request may bring forced tokens
        self.waiting: deque[Active] = deque()
        self._live: dict[int, Active] = {}  # by request id; of a reused id, the latest
        self.running: list[Active] = []  # in the order of arrival: admitted and preempted in that order
        self._steps_in_flight = 0
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self.padding_slot = limits.max_batch_size

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Active) -> None:
        self.waiting.append(request)
        self._live[request.request.id] = request

    def schedule(self) -> Batch | None:
        """The next step, its requests already counted as in flight; None when nothing can run now."""
        batch = self._prefill() or self._decode()
        if batch is not None:
            if self.sampling:
                batch = with_sampling(batch)
            if self.scoring:
                batch = with_targets(batch)
            self._steps_in_flight += 1
            for request in batch.requests:
                request.context += 1
                request.in_flight += 1
        return batch

    def append(self, batch: Batch, ids: Sequence[int], eos: frozenset[int]) -> list[tuple[Active, int]]:
        """Give each request of a finished step its token; (request, token) of those that still wanted one.

        A request that ended while this step was in flight drops its token. Blocks and slot go back only when
        no launched step uses them any more: none may ever write into the next owner's.
        """
        self._steps_in_flight -= 1
        if batch.family == "scored":
            ids = _keep_scores(batch, ids)
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
                if self.prefix_cache:
                    self._keep_full_blocks(request)
            if request.finish_reason and not request.in_flight:
                self._release(request)
        return appended

    def end(self, request_id: int, reason: str) -> Active | None:
        """End a request for a reason other than its tokens; None where it has ended already. What steps in
        flight give it is dropped, and its blocks and slot go back when those are done."""
        request = self._live.get(request_id)
        if request is None or request.finish_reason:
            return None
        request.finish_reason = reason
        if request.slot == NO_SLOT:
            self.waiting.remove(request)
            del self._live[request_id]
        elif not request.in_flight:
            self._release(request)
        return request

    def _release(self, request: Active) -> None:
        self.running.remove(request)
        self._free(request)
        if self._live.get(request.request.id) is request:
            del self._live[request.request.id]

    def _free(self, request: Active) -> None:
        """Its blocks and its slot."""
        self.pool.give_back(request.blocks)
        request.blocks = []
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT

    def _prefill(self) -> Batch | None:
        """Admit what waits, first come first served, up to the limits on requests, tokens and blocks.

        A block is left free for each request that may still grow, the admitted one included: running
        requests grow first, and would preempt it at once. Such blocks are always there in a pool of
        max_batch_size full contexts, and for a request that runs alone.
        """
        if not (self.waiting and self._free_slots):
            return None
        limits, blocks_for = self.limits, self.pool.blocks_for
        admitted, padded = list[Active](), 0
        reserved = sum(len(each.blocks) < blocks_for(each.most_kv_tokens) for each in self.running)
        while self.waiting and self._free_slots and len(admitted) < limits.prefill_max_batch_size:
            request = self.waiting[0]
            prefix = self._cached_prefix(request) if self.prefix_cache else []
            length = max(padded, request.context - len(prefix) * self.pool.block_size)
            if admitted and length * (len(admitted) + 1) > limits.prefill_max_tokens:
                break
            needed = blocks_for(request.context)
            grows = needed < blocks_for(request.most_kv_tokens)
            fresh = needed - len(prefix)
            if fresh + reserved + grows > self.pool.free - self.pool.unused(prefix):
                break
            self.waiting.popleft()
            padded = length
            reserved += grows
            if request.admitted_ns < 0:
                request.admitted_ns = perf_counter_ns()
            self.pool.share(prefix)
            request.blocks = prefix + self.pool.take(fresh)
            request.cached_blocks = request.kept_blocks = len(prefix)
            request.slot = self._free_slots.pop()
            self.tables.write(request.slot, request.blocks)
            admitted.append(request)
        if not admitted:
            return None
        self.running += admitted
        if any(request.cached_blocks for request in admitted):
            return extend_batch(admitted, padded, self.tables, self.pool.block_size)
        return prefill_batch(admitted, padded, self.pool.block_size)

    def _cached_prefix(self, request: Active) -> list[int]:
        """The kept blocks that hold its leading tokens, at most up to the one before its last."""
        full = (request.context - 1) // self.pool.block_size
        self._extend_keys(request, full)
        return self.pool.find(request.keys[:full])

    def _keep_full_blocks(self, request: Active) -> None:
        """Keep those whose ids are all on the host and were fed to a finished step: all but the newest id."""
        full = (len(request.prompt) + len(request.tokens) - 1) // self.pool.block_size
        if full > request.kept_blocks:
            self._extend_keys(request, full)
            for place in range(request.kept_blocks, full):
                self.pool.keep(request.blocks[place], request.keys[place])
            request.kept_blocks = full

    def _extend_keys(self, request: Active, count: int) -> None:
        """Keys for its first `count` blocks."""
        keys, size = request.keys, self.pool.block_size
        if len(keys) < count:
            ids = request.prompt + request.tokens
            for place in range(len(keys), count):
                keys.append(block_key(keys[-1] if keys else NO_KEY, ids[place * size : (place + 1) * size]))

    def _decode(self) -> Batch | None:
        """One more token for every running request that has use for one. Also None where blocks ran out while
        a step is in flight."""
        preempted = 0
        requests, growing = self._wanting()
        while len(growing) > self.pool.free:
            if self._steps_in_flight:
                return None
            self._preempt(self.running[-1])
            preempted += 1
            requests, growing = self._wanting()
        if not requests:
            return None
        for request, block in zip(growing, self.pool.take(len(growing)), strict=True):
            request.blocks.append(block)
            self.tables.write(request.slot, request.blocks)
        deepest = self.pool.blocks_for(max(request.context for request in requests))
        rows = next(bucket for bucket in self.limits.batch_buckets if bucket >= len(requests))
        blocks = next(bucket for bucket in self.limits.block_buckets if bucket >= deepest)
        batch = decode_batch(requests, rows, blocks, self.tables, self.pool.block_size, self.padding_slot)
        return replace(batch, preempted=preempted) if preempted else batch

    def _wanting(self) -> tuple[list[Active], list[Active]]:
        """Those that have use for one more token, and those of them that need one more block for it."""
        size = self.pool.block_size
        requests = [each for each in self.running if each.context < each.limit and not each.finish_reason]
        return requests, [each for each in requests if each.context > len(each.blocks) * size]

    def _preempt(self, request: Active) -> None:
        """Back to the front of the queue: its tokens stay on the host, its keys and values are lost."""
        assert not request.in_flight, "a step in flight still reads its blocks"
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)


def prefill_batch(requests: list[Active], length: int, block_size: int) -> Batch:
    """Whole prompts, and the tokens so far of those that were preempted, padded on the right to `length`."""
    values = _new_tokens(requests, length, block_size)
    return Batch("prefill", tuple(requests), len(requests), length, 0, values)


def extend_batch(requests: list[Active], length: int, tables: Tables, block_size: int) -> Batch:
    """What is left of prompts after their cached prefixes, padded on the right to `length`."""
    blocks = max(len(request.blocks) for request in requests)
    values = _new_tokens(requests, length, block_size)
    values["block_tables"] = tables.read([request.slot for request in requests], blocks)
    cached = sum(request.cached_blocks for request in requests) * block_size
    return Batch("prefill", tuple(requests), len(requests), length, blocks, values, cached_tokens=cached)


def _new_tokens(requests: list[Active], length: int, block_size: int) -> dict[str, Values]:
    input_ids, position_ids, slot_mapping = list[int](), list[int](), list[int]()
    for request in requests:
        first = request.cached_blocks * block_size
        padding = length - (request.context - first)
        input_ids += (request.prompt + request.tokens)[first:] + [0] * padding
        position_ids += [*range(first, request.context), *([0] * padding)]
        slot_mapping += [
            request.blocks[position // block_size] * block_size + position % block_size
            for position in range(first, request.context)
        ] + [DUMMY_SLOT] * padding
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "slot_mapping": slot_mapping,
        "context_lens": [request.context for request in requests],
        "request_slots": [request.slot for request in requests],
    }


def decode_batch(
    requests: list[Active], rows: int, blocks: int, tables: Tables, block_size: int, padding_slot: int
) -> Batch:
    """The newest token of each request, padded to `rows`. A token that is still in flight is named by its
    place in the future map."""
    padding = [0] * (rows - len(requests))
    last = [request.context - 1 for request in requests]
    slots = [request.slot for request in requests] + [padding_slot] * len(padding)
    values: dict[str, Values] = {
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


# Each array of a family: the field of a request that fills it, and the value of a padding row.
SAMPLED_BY: dict[str, tuple[str, float]] = {
    "seeds": ("seed", 0),
    "temperatures": ("temperature", 0.0),
    "top_ks": ("top_k", 0),
    "top_ps": ("top_p", 1.0),
}


def with_sampling(batch: Batch) -> Batch:
    """The batch in the family that its requests need, with the arrays of that family."""
    requests = [active.request for active in batch.requests]
    if all(request.temperature == 0 for request in requests):
        return batch
    family = "filtered" if any(each.top_k > 0 or each.top_p < 1 for each in requests) else "sampled"
    padding = batch.rows - len(requests)
    columns = {
        name: [getattr(request, field) for request in requests] + [empty] * padding
        for name in FAMILIES[family]
        for field, empty in (SAMPLED_BY[name],)
    }
    return replace(batch, values=batch.values | columns, family=family)


def with_targets(batch: Batch) -> Batch:
    """The batch in the family that scores, where some request brought forced tokens."""
    targets = [request.target for request in batch.requests]
    if all(target == NO_TARGET for target in targets):
        return batch
    padding = [NO_TARGET] * (batch.rows - len(targets))
    return replace(batch, values=batch.values | {"targets": targets + padding}, family="scored")


def _keep_scores(batch: Batch, words: Sequence[int]) -> Sequence[int]:
    """The tokens of a scored step; requests that still run get the scores of theirs."""
    tokens, found = scores(words, batch.values["targets"][: len(batch.requests)])  # type: ignore[arg-type]
    for request, score in zip(batch.requests, found, strict=True):
        if request.request.forced and not request.finish_reason:
            request.scores.append(score)
    return tokens
