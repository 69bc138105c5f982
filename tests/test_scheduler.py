"""The scheduler and the block pool, without a device: nothing is lost, doubled or leaked."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import Request
from engines.overlap.engine import ladder
from engines.overlap.kv_cache import BlockPool
from engines.overlap.request import Active
from engines.overlap.scheduler import Batch, Limits, Scheduler
from engines.overlap.toggles import tables

EOS = 9
BLOCK = 4
CONTEXT = 32


def make_scheduler(
    batch: int = 4, blocks: int = 40, prefill_batch: int = 3, prefill_tokens: int = 48, choice: str = "full"
) -> Scheduler:
    limits = Limits(batch, prefill_batch, prefill_tokens, ladder(batch), ladder(CONTEXT // BLOCK))
    block_tables = tables.choose(choice, batch + 1, CONTEXT // BLOCK, Counter())
    return Scheduler(BlockPool(blocks, BLOCK), limits, block_tables)


def make_request(number: int, prompt: int, count: int, stop: bool = False) -> Active:
    return Active(Request(number, [1] * prompt, count, stop), [1] * prompt, 0, 0)


lengths = st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(0, 16))


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(lengths, min_size=1, max_size=12),
    ahead=st.integers(0, 1),
    batch=st.integers(1, 6),
    blocks=st.integers(9, 60),
)
def test_every_request_gets_its_tokens_once_and_every_block_comes_back(asked, ahead, batch, blocks):
    """`ahead` 0 is the serial loop, 1 the overlap loop. Each request's n-th token is n + 100, its EOS at
    `stop_at` (0: never)."""
    scheduler = make_scheduler(batch, blocks)
    stop_at = {number: stop for number, (_, _, stop) in enumerate(asked)}
    requests = [make_request(n, prompt, count, stop=True) for n, (prompt, count, _) in enumerate(asked)]
    for request in requests:
        scheduler.add(request)
    flying: deque = deque()
    computed = dict.fromkeys(stop_at, 0)
    appended: dict[int, list[int]] = {number: [] for number in stop_at}
    while not scheduler.idle or flying:
        step = scheduler.schedule()
        if step is not None:
            assert len(step.requests) <= batch
            owners = [block for request in scheduler.running for block in request.blocks]
            assert len(owners) == len(set(owners)), "a block has two owners"
            assert 0 not in owners, "the dummy block was handed out"
            if step.kind == "prefill":
                assert step.tokens <= 48 or len(step.requests) == 1
                assert len(step.requests) <= 3
            ids = []
            for request in step.requests:
                computed[request.request.id] += 1
                nth = computed[request.request.id]
                ids.append(EOS if nth == stop_at[request.request.id] else 100 + nth)
            flying.append((step, ids))
        if len(flying) > ahead or (step is None and flying):
            done, ids = flying.popleft()
            for request, token in scheduler.append(done, ids, frozenset({EOS})):
                appended[request.request.id].append(token)
    for number, (_, count, stop) in enumerate(asked):
        wanted = min(count, stop) if stop else count
        expected = [EOS if nth == stop else 100 + nth for nth in range(1, wanted + 1)]
        assert appended[number] == expected
        assert computed[number] - len(expected) in ((0, 1) if ahead and 0 < stop < count else (0,))
    assert scheduler.pool.free == blocks - 1


def test_blocks_of_a_finished_request_stay_taken_while_a_step_that_reads_them_is_in_flight():
    scheduler = make_scheduler()
    request = make_request(0, prompt=3, count=8, stop=True)
    scheduler.add(request)
    free = scheduler.pool.free
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    scheduler.append(prefill, [EOS], frozenset({EOS}))
    assert request.finish_reason == "eos"
    assert scheduler.pool.free < free, "the decode step in flight still writes into these blocks"
    assert scheduler.append(decode, [7], frozenset({EOS})) == [], "the token after EOS is dropped"
    assert scheduler.pool.free == free


def test_a_token_in_flight_is_named_by_its_request_slot():
    scheduler = make_scheduler()
    request = make_request(0, prompt=3, count=8)
    scheduler.add(request)
    scheduler.schedule()
    decode = scheduler.schedule()
    assert decode.values["input_ids"] == [-1 - request.slot]
    assert decode.values["position_ids"] == [3]
    assert decode.values["context_lens"] == [4]


@pytest.mark.parametrize("choice", tables.TOGGLE.choices)
def test_a_batch_does_not_change_when_its_requests_do(choice):
    scheduler = make_scheduler(choice=choice)
    for number in range(3):
        scheduler.add(make_request(number, prompt=2, count=9))
    prefill = scheduler.schedule()
    scheduler.append(prefill, [5, 6, 7], frozenset())
    decode = scheduler.schedule()
    before = told(decode)
    scheduler.append(decode, [8, 8, 8, 0], frozenset())
    scheduler.schedule()
    scheduler.tables.rows[:] = -1
    assert told(decode) == before


def told(batch: Batch) -> str:
    """Everything the device is told by a batch, as text."""
    return str({name: list(values) for name, values in batch.values.items()}) + str(batch.changed_rows)


def test_giving_a_block_back_twice_is_refused():
    pool = BlockPool(8, BLOCK)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(KeyError):
        pool.give_back(blocks)


@given(st.integers(1, 5000))
def test_a_bucket_is_never_more_than_half_empty(most):
    sizes = ladder(most)
    assert sizes[-1] == most
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
