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
from time import perf_counter_ns

import numpy as np

from overlap_bench.engines.overlap.kv_cache import NO_KEY, BlockPool, block_key
from overlap_bench.engines.overlap.layout import DUMMY_SLOT, FAMILIES, NO_TARGET, program_name
from overlap_bench.engines.overlap.request import NO_SLOT, Active
from overlap_bench.engines.overlap.scoring import scores
from overlap_bench.engines.overlap.toggles.tables import Tables

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
    `gives` is how many tokens each request is given, one decode step after another (toggle steps); or at
    most, where the device says how many they were (`counted`: toggle spec; the kind is "decode" still).

    A mixed step (toggle chunk) has `decode_rows` rows that decode, over `decode_blocks` blocks, then its
    prompts' rows, of which the last `unfinished` are given nothing: their prompts go on in a later step. In
    steps of other kinds all three are 0.
    """

    kind: str  # "prefill", "decode" or "mixed"
    requests: tuple[Active, ...]
    rows: int
    length: int
    blocks: int
    values: dict[str, Values]
    changed_rows: Sequence[tuple[int, np.ndarray]] = ()
    cached_tokens: int = 0
    preempted: int = 0
    family: str = "greedy"
    gives: int = 1
    counted: bool = False
    decode_rows: int = 0
    decode_blocks: int = 0
    unfinished: int = 0
    mixed: bool = False  # the program for mixed steps runs it; its kind is "prefill" where nobody decodes

    @property
    def tokens(self) -> int:
        """Tokens fed to the model, padding included."""
        return self.decode_rows + (self.rows - self.decode_rows) * max(self.length, self.gives)

    @property
    def given(self) -> tuple[Active, ...]:
        """The requests that it gives a token. What an unfinished prompt's row samples reaches nobody: toggle
        chunk's guard."""
        return self.requests[: len(self.requests) - self.unfinished]

    @property
    def sampled(self) -> int:
        """How many ids come back: [gives, rows], padding included; where they are counted, a count for each
        row behind them."""
        return (self.gives + self.counted) * self.rows

    @property
    def program(self) -> tuple[str, *tuple[int, ...]]:
        """The program that runs it and its arguments."""
        if self.kind == "decode":
            kind = "verify" if self.counted else "decode"
            return (program_name(kind, self.family), self.rows, self.blocks)
        if self.mixed:
            prompts = self.rows - self.decode_rows
            name = program_name("mixed", self.family)
            return (name, self.decode_rows, self.decode_blocks, prompts, self.length, self.blocks)
        if self.blocks:
            return (program_name("extend", self.family), self.rows, self.length, self.blocks)
        return (program_name("prefill", self.family), self.rows, self.length)


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
class Limits:
    max_batch_size: int
    prefill_max_batch_size: int
    prefill_max_tokens: int  # padded; a preempted request may have more, and then runs alone
    batch_buckets: tuple[int, ...]  # ascending; the last one is max_batch_size
    block_buckets: tuple[int, ...]  # ascending; the last one holds the longest request
    chunk_tokens: int = 0  # padded, of prompts in a mixed step


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
        pool: BlockPool,
        limits: Limits,
        tables: Tables,
        prefix_cache: bool = False,
        sampling: bool = False,
        scoring: bool = False,
        gives: int = 1,
        counted: bool = False,
        *,
        compose: Callable[[Scheduler], Batch | None],
        goes_on: Callable[[int], bool],
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.tables = tables
        self.prefix_cache = prefix_cache
        self.sampling = sampling  # whether a request may ask for a temperature
        self.scoring = scoring  # whether a request may bring forced tokens
        self.compose = compose  # what goes into the next batch
        self.gives = gives  # tokens that a batch of decode gives each request, at most
        self.counted = counted  # whether how many they were comes back with them
        self.goes_on = goes_on  # where it does: whether more is scheduled before the host knows
        self.growth = pool.blocks_for(gives)  # blocks that a request can need for them at most
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
        batch = self.compose(self)
        if batch is not None:
            if self.sampling:
                batch = with_sampling(batch)
            if self.scoring:
                batch = with_targets(batch)
            self._steps_in_flight += 1
            for request in batch.requests:
                request.in_flight += 1
            for request in batch.given:
                # At most: where the device counts what it gives (toggle spec), `_correct` puts it right.
                request.context = min(request.context + batch.gives, request.limit)
        return batch

    def append(self, batch: Batch, ids: Sequence[int], eos: frozenset[int]) -> Appended:
        """Give each request of a finished step its tokens, as far as it still wants them.

        A request that ended while this step was in flight drops them. Blocks and slot go back only when no
        launched step uses them any more: none may ever write into the next owner's.
        """
        self._steps_in_flight -= 1
        if batch.family == "scored":
            ids = _keep_scores(batch, ids)
        appended = Appended()
        # Ids lie [gives, rows], where they are counted with the counts as one more line; padding comes last.
        lines = [ids[first : first + batch.rows] for first in range(0, batch.sampled, batch.rows)]
        for request, given in zip(batch.given, zip(*lines, strict=True), strict=False):
            request.in_flight -= 1
            if request.finish_reason:
                appended.dropped_rows += 1
            elif batch.counted:
                *tokens, count = given
                self._append_to(request, tokens[:count], eos, appended)
                self._correct(request, count, appended)
            else:
                self._append_to(request, given, eos, appended)
            if request.finish_reason and not request.in_flight:
                self._release(request)
        for request in batch.requests[len(batch.given) :]:
            request.in_flight -= 1
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
        if self.prefix_cache:
            self._keep_full_blocks(request)

    def _correct(self, request: Active, count: int, appended: Appended) -> None:
        """Put a request's length right once the host knows how many tokens a step has given it: steps under
        way were scheduled as if every step gave all it could."""
        request.context = min(request.known + request.in_flight * self.gives, request.limit)
        appended.drafts += self.gives - 1
        appended.accepted += count - 1

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

    def prefill(self) -> Batch | None:
        """Whole prompts of those that wait, first come first served, up to the limits on requests, tokens and
        blocks."""
        if not (self.waiting and self._free_slots):
            return None
        limits = self.limits
        admitted, padded = list[Active](), 0
        for request, prefix in self._admissible():
            length = max(padded, request.context - len(prefix) * self.pool.block_size)
            if admitted and length * (len(admitted) + 1) > limits.prefill_max_tokens:
                break
            padded = length
            self._admit(request, prefix)
            admitted.append(request)
            if len(admitted) == limits.prefill_max_batch_size:
                break
        if not admitted:
            return None
        if any(request.cached_blocks for request in admitted):
            return extend_batch(admitted, padded, self.tables, self.pool.block_size)
        return prefill_batch(admitted, padded, self.pool.block_size)

    def take_chunks(self) -> list[tuple[Active, int]]:
        """The next part of each prompt that chunk_tokens have room for, and how many tokens it has. A prompt
        that is under way goes on before another is begun."""
        limits, budget = self.limits, self.limits.chunk_tokens
        chunks, padded = list[tuple[Active, int]](), 0

        def fits(left: int) -> bool:
            length = max(padded, min(left, budget))
            return not chunks or length * (len(chunks) + 1) <= budget

        for request in self.running:
            if request.left and not request.finish_reason:
                if not fits(request.left):
                    return chunks
                chunks.append((request, min(request.left, budget)))
                padded = max(padded, chunks[-1][1])
        for request, prefix in self._admissible():
            left = request.context - len(prefix) * self.pool.block_size
            if len(chunks) == limits.prefill_max_batch_size or not fits(left):
                break
            self._admit(request, prefix)
            request.left = left
            chunks.append((request, min(left, budget)))
            padded = max(padded, chunks[-1][1])
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
            prefix = self._cached_prefix(request) if self.prefix_cache else []
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

    def decode(self) -> Batch | None:
        """One decode step, or several, for every running request that has use for one more token. Also None
        where blocks ran out while a step is in flight."""
        decoding = self.grow()
        return self.decode_grown(decoding) if decoding is not None else None

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

    def decode_grown(self, decoding: Decoding) -> Batch | None:
        """The decode step of those that have grown, if there are any."""
        return self._decode_batch(decoding) if decoding.requests else None

    def _decode_batch(self, decoding: Decoding) -> Batch:
        requests = decoding.requests
        deepest = self.pool.blocks_for(decoding.deepest)
        rows = next(bucket for bucket in self.limits.batch_buckets if bucket >= len(requests))
        blocks = next(bucket for bucket in self.limits.block_buckets if bucket >= deepest)
        if self.counted:
            batch = verify_batch(requests, rows, blocks, self.tables, self.padding_slot)
        else:
            batch = decode_batch(requests, rows, blocks, self.tables, self.pool.block_size, self.padding_slot)
        if decoding.preempted or self.gives > 1:
            return replace(batch, preempted=decoding.preempted, gives=self.gives)
        return batch

    def mix(self, decoding: Decoding, chunks: list[tuple[Active, int]]) -> Batch:
        """One token of each that has grown, beside these parts of prompts."""
        whole = all(count == request.context for request, count in chunks)
        length = max(count for _, count in chunks)
        if whole and not decoding.requests:  # nothing to mix
            batch = prefill_batch([request for request, _ in chunks], length, self.pool.block_size)
        else:
            batch = mixed_batch(decoding.requests, chunks, length, self.tables, self.pool.block_size)
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


def prefill_batch(requests: list[Active], length: int, block_size: int) -> Batch:
    """Whole prompts, and the tokens so far of those that were preempted, padded on the right to `length`."""
    values = _new_tokens([(each, 0, each.context) for each in requests], length, block_size)
    return Batch("prefill", tuple(requests), len(requests), length, 0, {**values})


def extend_batch(requests: list[Active], length: int, tables: Tables, block_size: int) -> Batch:
    """What is left of prompts after their cached prefixes, padded on the right to `length`."""
    blocks = max(len(request.blocks) for request in requests)
    cached = [request.cached_blocks * block_size for request in requests]
    parts = [(each, first, each.context) for each, first in zip(requests, cached, strict=True)]
    values: dict[str, Values] = {
        **_new_tokens(parts, length, block_size),
        "block_tables": tables.read([request.slot for request in requests], blocks),
    }
    return Batch("prefill", tuple(requests), len(requests), length, blocks, values, cached_tokens=sum(cached))


def mixed_batch(
    decoding: list[Active], chunks: list[tuple[Active, int]], length: int, tables: Tables, block_size: int
) -> Batch:
    """Rows that decode, then parts of prompts, padded on the right to `length`. Each part has `left` tokens
    to go, and begins where they do."""
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
        "mixed" if decoding else "prefill",
        (*decoding, *(each for each, _ in chunks)),
        len(decoding) + len(chunks),
        length,
        blocks,
        values,
        cached_tokens=sum(each.cached_blocks for each in begun) * block_size,
        decode_rows=len(decoding),
        decode_blocks=reach,
        mixed=True,
    )


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


def decode_batch(
    requests: list[Active], rows: int, blocks: int, tables: Tables, block_size: int, padding_slot: int
) -> Batch:
    """The newest token of each request, padded to `rows`."""
    newest, padding = _newest_tokens(requests, block_size), rows - len(requests)
    empty = {"slot_mapping": DUMMY_SLOT, "context_lens": 1, "request_slots": padding_slot}
    padded = {name: each + [empty.get(name, 0)] * padding for name, each in newest.items()}
    slots = padded["request_slots"]
    values: dict[str, Values] = {**padded, **tables.whole(slots, blocks)}
    return Batch("decode", tuple(requests), rows, 0, blocks, values, tables.changed(slots))


def verify_batch(requests: list[Active], rows: int, blocks: int, tables: Tables, padding_slot: int) -> Batch:
    """Drafts behind the newest token of each request, padded to `rows`. Which tokens these are, and where,
    the device knows; it is told who and where their blocks are."""
    slots = [request.slot for request in requests] + [padding_slot] * (rows - len(requests))
    values: dict[str, Values] = {"request_slots": slots, **tables.whole(slots, blocks)}
    return Batch("decode", tuple(requests), rows, 0, blocks, values, tables.changed(slots), counted=True)


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
        "request_slots": [request.slot for request in requests],
    }


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
    for request, score in zip(batch.given, found, strict=False):
        if request.request.forced and not request.finish_reason:
            request.scores.append(score)
    return tokens
