"""The scheduler and the block pool, without a device: nothing is lost, doubled or leaked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import Request
from engines.overlap.engine import ladder
from engines.overlap.kv_cache import BlockPool
from engines.overlap.request import Active
from engines.overlap.scheduler import Limits, Scheduler
from tests.simulation import EOS, VOCABULARY, Simulation

BLOCK = 4
CONTEXT = 32


def make_scheduler(
    batch: int = 4, blocks: int = 40, prefill_batch: int = 3, prefill_tokens: int = 48
) -> Scheduler:
    limits = Limits(batch, prefill_batch, prefill_tokens, ladder(batch), ladder(CONTEXT // BLOCK))
    return Scheduler(BlockPool(blocks, BLOCK), limits)


def make_request(number: int, prompt: int, count: int, stop: bool = False) -> Active:
    return Active(Request(number, [1] * prompt, count, stop), [1] * prompt, 0, 0)


lengths = st.tuples(st.integers(1, 16), st.integers(1, 16), st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(lengths, min_size=1, max_size=12),
    ahead=st.integers(0, 1),
    batch=st.integers(1, 6),
    blocks=st.integers(9, 30),
)
def test_every_request_gets_its_tokens_once_and_every_block_comes_back(asked, ahead, batch, blocks):
    """Down to a pool that holds one full request and nothing else."""
    simulation = Simulation(batch=batch, blocks=blocks, ahead=ahead)
    for number, (prompt, count, stop) in enumerate(asked):
        ids = [(number * 7 + place) % VOCABULARY for place in range(prompt)]
        simulation.submit(Request(number, ids, count, stop))
    turns = 0
    while simulation.busy:
        simulation.step()
        simulation.check()
        turns += 1
        assert turns < 3000, "no request gets on"
    assert len(simulation.ended) == len(asked)
    simulation.check_ended()
    assert simulation.scheduler.pool.free == blocks - 1


def grown_until_blocks_run_out(ahead: int) -> tuple[Simulation, Active, Active]:
    """Two requests that fit together only at first, at the step that finds no block for both."""
    simulation = Simulation(batch=2, blocks=6, ahead=ahead)
    for number in range(2):
        simulation.submit(Request(number, [number + 1] * 3, 12))
    scheduler = simulation.scheduler
    while len(scheduler._wanting()[1]) <= scheduler.pool.free:
        simulation.step()
    return simulation, simulation.live[0], simulation.live[1]


def test_the_youngest_is_put_back_with_its_tokens_and_goes_first_when_blocks_are_free():
    simulation, older, younger = grown_until_blocks_run_out(ahead=0)
    had = list(younger.tokens)
    assert had
    simulation.submit(Request(2, [9] * 3, 12))
    simulation.step()
    assert list(simulation.scheduler.waiting) == [younger, simulation.live[2]]
    assert simulation.scheduler.running == [older]
    assert younger.tokens == had
    while simulation.busy:
        simulation.step()
    assert list(simulation.ended) == [0, 1, 2]
    simulation.check_ended()


def test_nothing_is_put_back_while_a_step_is_in_flight():
    simulation, older, younger = grown_until_blocks_run_out(ahead=1)
    assert younger.in_flight
    assert simulation.scheduler.schedule() is None, "drain first"
    assert younger.blocks
    simulation.read()
    batch = simulation.scheduler.schedule()
    assert (batch.requests, batch.preempted) == ((older,), 1)
    assert not younger.blocks


def test_without_draining_first_a_request_would_be_put_back_under_the_device():
    simulation, _, _ = grown_until_blocks_run_out(ahead=1)
    simulation.scheduler._steps_in_flight = 0
    with pytest.raises(AssertionError, match="still reads its blocks"):
        simulation.scheduler.schedule()


def test_admission_leaves_a_block_for_each_that_may_still_grow():
    simulation = Simulation(batch=4, blocks=1 + 6, prefill_batch=4, ahead=0)
    for number in range(4):
        simulation.submit(Request(number, [1] * 4, 8))
    batch = simulation.scheduler.schedule()
    assert len(batch.requests) == 3, "three blocks taken, three left to grow into"


def test_a_pool_for_every_full_request_delays_and_preempts_nothing():
    simulation = Simulation(batch=4, blocks=1 + 4 * 8, prefill_batch=4, prefill_tokens=64, ahead=1)
    for number in range(4):
        simulation.submit(Request(number, [number] * 16, 16))
    simulation.step()
    assert len(simulation.scheduler.running) == 4
    while simulation.busy:
        simulation.step()
    assert simulation.preempted == 0


def test_one_that_outgrew_the_prefill_limit_is_prefilled_again_alone():
    simulation = Simulation(batch=2, blocks=1 + 8, prefill_tokens=8, ahead=1)
    for number in range(2):
        simulation.submit(Request(number, [number + 1] * 8, 20))
    while simulation.busy:
        simulation.step()  # checks the limit, and that a batch beyond it is of one request
    assert simulation.preempted
    simulation.check_ended()


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


def test_a_batch_does_not_change_when_its_requests_do():
    scheduler = make_scheduler()
    for number in range(3):
        scheduler.add(make_request(number, prompt=2, count=9))
    prefill = scheduler.schedule()
    scheduler.append(prefill, [5, 6, 7], frozenset())
    decode = scheduler.schedule()
    before = {name: list(map(str, values)) for name, values in decode.values.items()}
    scheduler.append(decode, [8, 8, 8, 0], frozenset())
    scheduler.schedule()
    scheduler._tables[:] = -1
    assert {name: list(map(str, values)) for name, values in decode.values.items()} == before


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
