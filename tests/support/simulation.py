"""The scheduler on a device of the same contract that computes almost nothing: its KV cache holds token ids.

A token depends on every token before it, in order, and is computed from what lies in the blocks that the
step's metadata names. So a block with two owners, a wrong slot, a stale block or a lost token shows as a
wrong token, as it would on a real device.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from overlap_bench.engines.api import Request
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.config import ModelConfig, bucket_sizes
from overlap_bench.engines.overlap.programs import Mixed, Prefill
from overlap_bench.engines.overlap.request import NO_SLOT, Active
from overlap_bench.engines.overlap.scheduler import Scheduler
from overlap_bench.engines.overlap.toggles import accept, chunk, tables

VOCABULARY = 97
EOS = 5
_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 40, size=4096)


def next_token(tokens: Sequence[int] | np.ndarray) -> int:
    """What follows these tokens."""
    return int(np.dot(tokens, _WEIGHTS[: len(tokens)]) % VOCABULARY)


def expected_tokens(request: Request) -> list[int]:
    """All tokens of a request that nobody stops."""
    assert not isinstance(request.prompt, str)
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(next_token(tokens))
        if request.stop_on_eos and tokens[-1] == EOS:
            break
    return tokens[len(request.prompt) :]


class StubDevice:
    """Runs batches in order, as a stream does."""

    def __init__(self, num_blocks: int, block_size: int, slots: int, most_blocks: int) -> None:
        self.block_size = block_size
        self.kv = np.full(num_blocks * block_size, -1)
        self.future = np.full(slots + 1, -1)
        self.tables = np.full((slots + 1, most_blocks), -1)
        self.said: dict[int, list[int]] = {}  # by request slot: all tokens so far, its prompt's included

    def run(self, batch: Batch) -> list[int]:
        """The sampled ids, padding rows included."""
        values = {name: np.asarray(each) for name, each in batch.values.items()}
        for slot, changed in batch.changed_rows:
            self.tables[slot] = changed
        if batch.program.counted:
            return self._verify(batch, values)
        ids = values["input_ids"]
        ids = np.where(ids < 0, self.future[np.maximum(-1 - ids, 0)], ids)
        self.kv[values["slot_mapping"]] = ids
        sampled = self._sample(batch, values, 0)
        for turn in range(1, batch.program.gives):
            for row in range(len(batch.requests)):
                newest = sampled[(turn - 1) * batch.program.rows + row]
                self.kv[self._slots(batch, values, row, turn)[-1]] = newest
            sampled += self._sample(batch, values, turn)
        self.future[values["request_slots"]] = sampled[-batch.program.rows :]
        for row in range(len(batch.given)):
            said = [*self.kv[self._slots(batch, values, row, 0)].tolist(), sampled[row]]
            self.said[values["request_slots"][row]] = said
        return sampled

    def _verify(self, batch: Batch, values: dict[str, np.ndarray]) -> list[int]:
        """Each row's newest token with drafts behind it, of which every so many are right."""
        sampled = np.zeros((batch.program.gives + 1, batch.program.rows), dtype=np.int64)
        for row in range(len(batch.requests)):
            said = self.said[values["request_slots"][row]]
            known, right = len(said), list(said)
            for _ in range(batch.program.gives):
                right.append(next_token(right))
            drafts = [token if (token + known) % 3 else (token + 1) % VOCABULARY for token in right[known:-1]]
            slots = self._places(self._table(batch, values, row), known + len(drafts))
            self.kv[slots[known - 1 :]] = [said[-1], *drafts]
            chosen = [next_token(self.kv[slots[: known + each]]) for each in range(batch.program.gives)]
            kept = 1
            while kept < batch.program.gives and chosen[kept - 1] == drafts[kept - 1]:
                kept += 1
            sampled[:-1, row], sampled[-1, row] = chosen, kept
            said += chosen[:kept]
        ids: list[int] = sampled.ravel().tolist()
        return ids

    def _sample(self, batch: Batch, values: dict[str, np.ndarray], turn: int) -> list[int]:
        """The next id of each row, so many decode steps later."""
        return [
            next_token(self.kv[self._slots(batch, values, row, turn)]) if row < len(batch.requests) else 0
            for row in range(batch.program.rows)
        ]

    def _slots(self, batch: Batch, values: dict[str, np.ndarray], row: int, turn: int) -> np.ndarray:
        """Where the keys and values of a request lie, from its first token on. Beyond its table is the dummy
        block, whose first place stands for all of it."""
        count = values["context_lens"][row] + turn
        if type(batch.program) is Prefill:
            return values["slot_mapping"][row * batch.program.length :][:count]
        return self._places(self._table(batch, values, row), count)

    def _places(self, table: np.ndarray, count: int) -> np.ndarray:
        positions = np.arange(count)
        columns = positions // self.block_size
        beyond = columns >= len(table)
        slots: np.ndarray = table[columns * ~beyond] * self.block_size + positions % self.block_size
        slots[beyond] = 0
        return slots

    def _table(self, batch: Batch, values: dict[str, np.ndarray], row: int) -> np.ndarray:
        """The blocks of a row; those that decode in a mixed step come first, and have tables of their own
        width."""
        told = values.get("block_tables")
        tables: Sequence[np.ndarray] | np.ndarray
        if told is None:
            tables = self.tables[values["request_slots"]]
        elif isinstance(mixed := batch.program, Mixed):
            tabled = mixed.decode_rows * mixed.decode_blocks
            decoding = told[:tabled].reshape(mixed.decode_rows, -1) if mixed.decode_rows else told[:0]
            tables = [*decoding, *told[tabled:].reshape(-1, mixed.blocks)]
        else:
            tables = told
        table: np.ndarray = tables[row]
        return table


@dataclass
class Simulation:
    """A scheduler and a stub device; `ahead` steps are launched before the first one's ids are read: 0 is
    the serial loop, 1 the overlap loop."""

    batch: int = 4
    blocks: int = 40
    block_size: int = 4
    context: int = 32
    prefill_batch: int = 3
    prefill_tokens: int = 24
    ahead: int = 1
    prefix_cache: bool = False
    tables: str = "full"
    steps: int = 1
    chunk_tokens: int = 0  # 0: prompts are prefilled whole
    accept: str = ""  # under speculation: who knows how many drafts were kept
    flying: deque[tuple[Batch, list[int]]] = field(default_factory=deque)
    live: dict[int, Active] = field(default_factory=dict)
    ended: dict[int, Active] = field(default_factory=dict)
    preempted: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        buckets = bucket_sizes(-(-self.context // self.block_size))
        chosen = tables.CHOICES[self.tables](self.batch + 1, buckets[-1], Counter())
        config = ModelConfig(
            model="",
            max_batch_size=self.batch,
            prefill_max_batch_size=self.prefill_batch,
            prefill_max_tokens=self.prefill_tokens,
            max_context=self.context,
            block_size=self.block_size,
            num_blocks=self.blocks,
            prefix_cache=self.prefix_cache,
            chunk_tokens=self.chunk_tokens,
            steps=self.steps,
            drafts=3 if self.accept else 0,
        )
        self.scheduler = Scheduler(
            config,
            chosen,
            goes_on=accept.POLICIES[self.accept or "host"],
            compose=chunk.COMPOSE["on" if self.chunk_tokens else "off"],
        )
        self.device = StubDevice(self.blocks, self.block_size, self.batch, buckets[-1])

    @property
    def busy(self) -> bool:
        return bool(self.flying) or not self.scheduler.idle

    def submit(self, request: Request) -> None:
        assert not isinstance(request.prompt, str)
        active = Active(request, request.prompt, 0, 0)
        self.live[request.id] = active
        self.scheduler.add(active)

    def step(self) -> None:
        """One turn of the loop: schedule, launch, and read what is due."""
        batch = self.scheduler.schedule()
        if batch is not None:
            assert len(batch.requests) <= self.batch
            program = batch.program
            if isinstance(program, Prefill | Mixed):
                prompts = program.rows - program.decode_rows
                most = self.chunk_tokens or self.prefill_tokens
                alone = prompts == 1 and not self.chunk_tokens
                assert prompts * program.length <= most or alone
                assert prompts <= self.prefill_batch
            self.preempted += batch.preempted
            self.cached += batch.cached_tokens
            self.flying.append((batch, self.device.run(batch)))
        if len(self.flying) > self.ahead or (batch is None and self.flying):
            self.read()

    def read(self) -> None:
        """The oldest step's ids are on the host."""
        batch, ids = self.flying.popleft()
        for active, token, last in self.scheduler.append(batch, ids, frozenset({EOS})).tokens:
            assert token in active.tokens
            if last:
                self.ended[active.request.id] = self.live.pop(active.request.id)

    def end(self, request: int) -> None:
        """From outside: its text came to a stop string."""
        if self.scheduler.end(request):
            self.ended[request] = self.live.pop(request)

    def finish(self) -> None:
        """Step until nothing is left to do, and look at the books all along."""
        while self.busy:
            self.step()
            self.check()
        self.check_ended()

    def check(self) -> None:
        """Every block and slot has the owners it says it has, and none is lost."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        owners = Counter(block for request in scheduler.running for block in request.blocks)
        assert all(pool._owners[block] == owners[block] for block in range(self.blocks))
        shared = {block for block, count in owners.items() if count > 1}
        assert shared <= pool._keys.keys(), "a block that nobody keeps has two owners"
        for request in scheduler.running:
            assert pool.blocks_for(request.context - 1) <= len(request.blocks), "a token without a slot"
            assert 0 <= request.left <= request.context
            own = request.blocks[request.kept_blocks :]
            assert shared.isdisjoint(own), "a block was shared before it was known"
        assert 0 not in owners, "the dummy block was handed out"
        assert len(owners) + pool.free == self.blocks - 1, "a block leaked"
        assert {key: block for block, key in pool._keys.items()} == pool._kept
        assert pool._unused.keys() == {block for block in pool._keys if not owners[block]}
        assert pool._unused.keys().isdisjoint(pool._free)
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert NO_SLOT not in slots
        assert all(not request.blocks and request.slot == NO_SLOT for request in scheduler.waiting)
        arrived = [request.request.id for request in scheduler.running]
        assert arrived == sorted(arrived), "running is in the order of arrival"

    def check_ended(self) -> None:
        """Every request that ended has exactly its tokens; one that was ended, those it had by then."""
        for active in self.ended.values():
            expected = expected_tokens(active.request)
            if active.finish_reason not in ("length", "eos"):
                expected = expected[: len(active.tokens)]
            assert active.tokens == expected, active.request
