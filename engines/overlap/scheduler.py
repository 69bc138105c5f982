"""Which requests run next, and what the device must be told to run them.

Knows requests and blocks; knows no device and no thread. Prefill goes first: starting a waiting request is
worth more than one more token for the running ones. With chunk=on, both go together.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter_ns

from overlap_bench.engines.overlap.batch import Batch, Chunk, decode_batch, mixed_batch, prefill_batch
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.families import tokens_of, with_sampling, with_targets
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.prefixes import cached_prefix, keep_full_blocks
from overlap_bench.engines.overlap.programs import Decode, Verify
from overlap_bench.engines.overlap.request import NO_SLOT, Active
from overlap_bench.engines.overlap.toggles.tables import Tables


@dataclass(slots=True)
class Appended:
    """What became of a finished step's ids. `tokens` are those that were still wanted: (request, token,
    whether it is its last). Nobody wanted anything of `dropped_rows`; `past_end` tokens came to rows that had
    ended in the same step."""

    tokens: list[tuple[Active, int, bool]] = field(default_factory=list)
    dropped_rows: int = 0
    past_end: int = 0
    drafts: int = 0  # of the rows that wanted something, and how many of these the model said itself
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Requests that decode in the next step: they have the blocks for it. `deepest` is how many tokens of the
    longest have keys and values then."""

    requests: list[Active]
    deepest: int
    preempted: int


class Scheduler:
    def __init__(
        self,
        config: ModelConfig,
        tables: Tables,
        *,
        compose: Callable[[Scheduler], Batch | None],
        goes_on: Callable[[int], bool],
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.tables = tables
        self.compose = compose  # what goes into the next batch (toggle chunk)
        self.gives = config.gives
        self.counted = config.drafts > 0  # whether how many tokens a step gave comes back with them
        self.goes_on = (
            goes_on  # where it does: whether more is scheduled before the host knows (toggle accept)
        )
        self.growth = self.pool.blocks_for(self.gives)  # blocks that a request can need for them at most
        self.waiting: deque[Active] = deque()
        self._live: dict[int, Active] = {}  # by request id; of a reused id, the latest
        self.running: list[Active] = []  # in the order of arrival: admitted and preempted in that order
        self._steps_in_flight = 0
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._program = Verify if self.counted else Decode
        self._batch_buckets, self._block_buckets = config.batch_buckets, config.block_buckets

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Active) -> None:
        request.queued_ns = perf_counter_ns()
        self.waiting.append(request)
        self._live[request.request.id] = request

    def schedule(self) -> Batch | None:
        """The next step, its requests already counted as in flight; None when nothing can run now."""
        batch = self.compose(self)
        if batch is None:
            return None
        if self.config.sampling:
            batch = with_sampling(batch)
        if self.config.scoring:
            batch = with_targets(batch)
        self._steps_in_flight += 1
        for request in batch.requests:
            request.in_flight += 1
        for request in batch.given:
            # At most: where the device counts what it gives (toggle spec), `_correct` puts it right.
            request.context = min(request.context + batch.program.gives, request.limit)
        return batch

    def append(self, batch: Batch, ids: Sequence[int], eos: frozenset[int]) -> Appended:
        """Give each request of a finished step its tokens, as far as it still wants them.

        A request that ended while this step was in flight drops them. Blocks and slot go back only when no
        launched step uses them any more: none may ever write into the next owner's.
        """
        self._steps_in_flight -= 1
        appended, rows, ids, receivers = Appended(), batch.program.rows, tokens_of(batch, ids), batch.given
        # Ids lie [gives, rows], where they are counted with the counts as one more line; padding comes last.
        lines = [ids[first : first + rows] for first in range(0, batch.sampled, rows)]
        for request, given in zip(receivers, zip(*lines, strict=True), strict=False):
            request.in_flight -= 1
            if request.finish_reason:
                appended.dropped_rows += 1
            elif batch.program.counted:
                *tokens, count = given
                self._append_to(request, tokens[:count], eos, appended)
                self._correct(request, count, appended)
            else:
                self._append_to(request, given, eos, appended)
        for request in batch.requests[len(receivers) :]:
            request.in_flight -= 1
        for request in batch.requests:
            if request.finish_reason and not request.in_flight:
                self._release(request)
        return appended

    def _append_to(
        self, request: Active, tokens: Sequence[int], eos: frozenset[int], appended: Appended
    ) -> None:
        """The tokens that one request is given, up to its end."""
        before = len(request.tokens)
        for token in tokens:
            request.tokens.append(token)
            if request.request.stop_on_eos and token in eos:
                request.finish_reason = "eos"
            elif len(request.tokens) >= request.request.max_new_tokens:
                request.finish_reason = "length"
            appended.tokens.append((request, token, bool(request.finish_reason)))
            if request.finish_reason:
                break
        appended.past_end += before + len(tokens) - len(request.tokens)
        if self.config.prefix_cache:
            keep_full_blocks(self.pool, request)

    def _correct(self, request: Active, count: int, appended: Appended) -> None:
        """Put a request's length right once the host knows how many tokens a step has given it: steps under
        way were scheduled as if every step gave all it could."""
        request.context = min(request.known + request.in_flight * self.gives, request.limit)
        appended.drafts += self.gives - 1
        appended.accepted += count - 1

    def end(self, request_id: int) -> bool:
        """End a request whose text came to a stop string; False where it has ended already. What steps in
        flight give it is dropped, and its blocks and slot go back when those are done."""
        request = self._live.get(request_id)
        if request is None or request.finish_reason:
            return False
        request.finish_reason = "stop"
        if request.slot == NO_SLOT:
            self.waiting.remove(request)
            del self._live[request_id]
        elif not request.in_flight:
            self._release(request)
        return True

    def _release(self, request: Active) -> None:
        self.running.remove(request)
        self._free(request)
        if self._live.get(request.request.id) is request:
            del self._live[request.request.id]

    def _free(self, request: Active) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT

    def prefill(self) -> Batch | None:
        """Whole prompts of those that wait, first come first served, up to the limits on requests, tokens and
        blocks."""
        if not (self.waiting and self._free_slots):
            return None
        admitted, padded = list[Active](), 0
        for request, prefix in self._admissible():
            length = max(padded, request.context - len(prefix) * self.pool.block_size)
            if admitted and length * (len(admitted) + 1) > self.config.prefill_max_tokens:
                break
            padded = length
            self._admit(request, prefix)
            admitted.append(request)
            if len(admitted) == self.config.prefill_max_batch_size:
                break
        return prefill_batch(admitted, padded, self.tables, self.pool.block_size) if admitted else None

    def take_chunks(self) -> list[Chunk]:
        """The next part of each prompt that chunk_tokens have room for, and how many tokens it has. A prompt
        that is under way goes on before another is begun."""
        chunks, padded, budget = list[Chunk](), 0, self.config.chunk_tokens
        begun = [each for each in self.running if each.left and not each.finish_reason]
        for request, prefix in chain(((each, None) for each in begun), self._admissible()):
            new = request.left if prefix is None else request.context - len(prefix) * self.pool.block_size
            padded = max(padded, min(new, budget))
            if chunks and padded * (len(chunks) + 1) > budget:
                break
            if prefix is not None:
                if len(chunks) == self.config.prefill_max_batch_size:
                    break
                self._admit(request, prefix)
                request.left = new
            chunks.append((request, min(new, budget)))
        return chunks

    def _admissible(self) -> Iterator[tuple[Active, list[int]]]:
        """Waiting requests, each with the blocks of its prefix that are kept, as long as there are slots and
        blocks for them. Each must be admitted before the next one is asked for.

        The blocks of a step's growth are left free for each request, the admitted one included: running
        requests grow first, and would preempt it at once. Such blocks are always there in a pool of
        max_batch_size full contexts, and for a request that runs alone.
        """
        growth, blocks_for = self.growth, self.pool.blocks_for
        reserved = sum(
            min(growth, blocks_for(each.most_kv_tokens) - len(each.blocks)) for each in self.running
        )
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            prefix = cached_prefix(self.pool, request) if self.config.prefix_cache else []
            needed = blocks_for(request.context)
            grows = min(growth, blocks_for(request.most_kv_tokens) - needed)
            if needed - len(prefix) + reserved + grows > self.pool.free - self.pool.unused(prefix):
                break
            yield request, prefix
            reserved += grows

    def _admit(self, request: Active, prefix: list[int]) -> None:
        """The first of those that wait gets a slot, and blocks for all of its tokens so far."""
        self.waiting.popleft()
        if request.admitted_ns < 0:
            request.admitted_ns = perf_counter_ns()
        self.pool.share(prefix)
        request.blocks = prefix + self.pool.take(self.pool.blocks_for(request.context) - len(prefix))
        request.cached_blocks = request.kept_blocks = len(prefix)
        request.slot = self._free_slots.pop()
        self.tables.write(request.slot, request.blocks)
        self.running.append(request)

    def grow(self) -> Decoding | None:
        """Give every running request that has use for one more token the blocks for it. None where blocks ran
        out while a step is in flight, or where that step's count must be known first."""
        if self.counted and not self.goes_on(self._steps_in_flight):
            return None
        preempted = 0
        requests, growing, deepest = self._wanting()
        while sum(growing.values()) > self.pool.free:
            if self._steps_in_flight:
                return None
            self._preempt(self.running[-1])
            preempted += 1
            requests, growing, deepest = self._wanting()
        for request, count in growing.items():
            request.blocks += self.pool.take(count)
            self.tables.write(request.slot, request.blocks)
        return Decoding(requests, deepest, preempted)

    def decode(self, decoding: Decoding | None) -> Batch | None:
        """The decode step of those that have grown, or several, if there are any."""
        if decoding is None or not decoding.requests:
            return None
        rows = next(bucket for bucket in self._batch_buckets if bucket >= len(decoding.requests))
        deepest = self.pool.blocks_for(decoding.deepest)
        blocks = next(bucket for bucket in self._block_buckets if bucket >= deepest)
        program = self._program(rows, blocks, gives=self.gives)
        batch = decode_batch(decoding.requests, program, self.tables, self.pool.block_size)
        return replace(batch, preempted=decoding.preempted) if decoding.preempted else batch

    def mix(self, decoding: Decoding, chunks: list[Chunk]) -> Batch:
        """One token of each that has grown, beside these parts of prompts."""
        length = max(count for _, count in chunks)
        whole = not decoding.requests and all(count == request.context for request, count in chunks)
        if whole and length * len(chunks) <= self.config.prefill_tokens:  # nothing to mix, and it has room
            requests = [request for request, _ in chunks]
            batch = prefill_batch(requests, length, self.tables, self.pool.block_size)
        else:
            batch = mixed_batch(decoding.requests, chunks, self.tables, self.pool.block_size)
        for request, count in chunks:
            request.left -= count
        unfinished = sum(request.left > 0 for request, _ in chunks)
        return replace(batch, unfinished=unfinished, preempted=decoding.preempted)

    def _wanting(self) -> tuple[list[Active], dict[Active, int], int]:
        """The requests that have use for one more token, how many more blocks some of them need for it, and
        how many tokens of the longest have keys and values then."""
        size, ahead, deepest = self.pool.block_size, self.gives - 1, 0
        requests, growing = list[Active](), dict[Active, int]()
        for each in self.running:
            # A step whose tokens are counted may have given as little as one.
            wants = (each.known + each.in_flight if self.counted else each.context) < each.limit
            if wants and not each.finish_reason and not each.left:
                requests.append(each)
                reach = min(each.context + ahead, each.limit - 1)  # its last token is never fed back
                deepest = max(deepest, reach)
                missing = reach - len(each.blocks) * size
                if missing > 0:
                    growing[each] = self.pool.blocks_for(missing)
        return requests, growing, deepest

    def _preempt(self, request: Active) -> None:
        """Back to the front of the queue: its tokens stay on the host, its keys and values are lost."""
        assert not request.in_flight, "a step in flight still reads its blocks"
        request.left = 0
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)
