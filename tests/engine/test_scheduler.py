"""The scheduler and the block pool, without a device: nothing is lost, doubled or leaked."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overlap_bench.engines.api import Request
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.config import bucket_sizes
from overlap_bench.engines.overlap.kv_cache import BlockPool
from overlap_bench.engines.overlap.programs import Mixed
from overlap_bench.engines.overlap.request import Active
from overlap_bench.engines.overlap.toggles import accept, tables
from tests.support.simulation import EOS, VOCABULARY, Simulation, expected_tokens

BLOCK = 4

# Of one batch, 8 steps are more tokens than a block holds; and chunk_tokens of 3 split every prompt.
TODAY = (
    *({"steps": steps, "chunk_tokens": tokens} for steps in (1, 3, 8) for tokens in (0, 3, 12)),
    *({"accept": who} for who in accept.POLICIES),
)

lengths = st.tuples(st.integers(1, 16), st.integers(1, 16), st.booleans())


def grown_until_blocks_run_out(ahead: int) -> tuple[Simulation, Active, Active]:
    """Two requests that fit together only at first, at the step that finds no block for both."""
    simulation = Simulation(batch=2, blocks=6, ahead=ahead)
    for number in range(2):
        simulation.submit(Request(number, [number + 1] * 3, 12))
    scheduler = simulation.scheduler
    while len(scheduler._wanting()[1]) <= scheduler.pool.free:
        simulation.step()
    return simulation, simulation.live[0], simulation.live[1]


def test_the_youngest_is_preempted_with_its_tokens_and_goes_first_when_blocks_are_free():
    simulation, older, younger = grown_until_blocks_run_out(ahead=0)
    had = list(younger.tokens)
    assert had
    simulation.submit(Request(2, [9] * 3, 12))
    simulation.step()
    assert list(simulation.scheduler.waiting) == [younger, simulation.live[2]]
    assert simulation.scheduler.running == [older]
    assert younger.tokens == had
    simulation.finish()
    assert list(simulation.ended) == [0, 1, 2]


def test_nothing_is_preempted_while_a_step_is_in_flight():
    simulation, older, younger = grown_until_blocks_run_out(ahead=1)
    assert younger.in_flight
    assert simulation.scheduler.schedule() is None, "drain first"
    assert younger.blocks
    simulation.read()
    batch = simulation.scheduler.schedule()
    assert (batch.requests, batch.preempted) == ((older,), 1)
    assert not younger.blocks


def test_without_draining_first_a_request_would_be_preempted_under_the_device():
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
    simulation.finish()
    assert simulation.preempted == 0


def test_blocks_of_a_finished_request_stay_taken_while_a_step_that_reads_them_is_in_flight():
    simulation = Simulation()
    simulation.submit(Request(0, [1, 2, 3], 8, stop_on_eos=True))
    scheduler, request = simulation.scheduler, simulation.live[0]
    free = scheduler.pool.free
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    scheduler.append(prefill, [EOS], frozenset({EOS}))
    assert request.finish_reason == "eos"
    assert scheduler.pool.free < free, "the decode step in flight still writes into these blocks"
    appended = scheduler.append(decode, [7], frozenset({EOS}))
    assert (appended.tokens, appended.dropped_rows) == ([], 1), "the token after EOS is dropped"
    assert scheduler.pool.free == free


def test_one_that_is_ended_from_outside_keeps_its_blocks_until_no_step_in_flight_reads_them():
    simulation = Simulation(ahead=1)
    simulation.submit(Request(0, [1, 2, 3], 8))
    simulation.step()
    simulation.step()
    active = simulation.live[0]
    simulation.end(0)
    assert active.blocks
    assert simulation.scheduler.schedule() is None, "it wants nothing more"
    simulation.read()
    assert (active.finish_reason, active.blocks) == ("stop", [])
    assert simulation.scheduler.idle
    assert not simulation.scheduler.end(0)
    simulation.check_ended()


def test_a_full_block_is_shared_only_once_the_device_has_its_last_token():
    """The newest token is on the host before its keys and values are on the device."""
    simulation = Simulation(ahead=0, prefix_cache=True)
    prompt = [1] * (simulation.block_size - 1)
    simulation.submit(Request(0, prompt, 8))
    simulation.step()
    (newest,) = simulation.live[0].tokens
    simulation.submit(Request(1, [*prompt, newest, 2], 8))
    simulation.finish()


class Books(RuleBasedStateMachine):
    """Anything that can happen to a scheduler, in any order; the books are checked after each."""

    @initialize(
        batch=st.integers(1, 5),
        blocks=st.integers(9, 24),
        ahead=st.integers(0, 1),
        prefix_cache=st.booleans(),
        choice=st.sampled_from(tables.TOGGLE.choices),
        today=st.sampled_from(TODAY),
    )
    def begin(self, batch, blocks, ahead, prefix_cache, choice, today):
        self.simulation = Simulation(
            batch=batch,
            blocks=blocks,
            ahead=ahead,
            prefix_cache=prefix_cache,
            tables=choice,
            **today,
        )
        self.count = 0

    @rule(beginning=st.integers(0, 2), asked=lengths)
    def submit(self, beginning, asked):
        prompt, count, stop = asked
        ids = [(beginning * 7 + place) % VOCABULARY for place in range(prompt)]
        self.simulation.submit(Request(self.count, ids, count, stop))
        self.count += 1

    @rule(turns=st.integers(1, 6))
    def step(self, turns):
        for _ in range(turns):
            self.simulation.step()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def end(self, data):
        self.simulation.end(data.draw(st.integers(0, self.count - 1)))

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.finish()
            assert len(self.simulation.ended) == self.count
            assert self.simulation.scheduler.pool.free == self.simulation.blocks - 1


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("choice", tables.TOGGLE.choices)
def test_a_batch_does_not_change_when_its_requests_do(choice):
    simulation = Simulation(tables=choice)
    for number in range(3):
        simulation.submit(Request(number, [1, 1], 9))
    scheduler = simulation.scheduler
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
    with pytest.raises(ValueError, match="has no owner"):
        pool.give_back(blocks)


EIGHT, SAME = list(range(1, 9)), [7, 8, 9, 10]
TALK = Request(0, [1, 2, 3], 10)
TALKED = [*TALK.prompt, *expected_tokens(TALK)]


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (Request(0, list(range(1, 12)), 2), Request(1, [*range(1, 10), 50, 51], 2), 2 * BLOCK),
        (Request(0, EIGHT, 1), Request(1, EIGHT, 1), BLOCK),
        (TALK, Request(1, [*TALKED, 60], 2), 12 // BLOCK * BLOCK),
        (Request(0, [1, 2, 3, 4, *SAME, 5], 1), Request(1, [4, 3, 2, 1, *SAME, 5], 1), 0),
    ],
    ids=[
        "they begin alike",
        "equal, but the last token is prefilled",
        "a second turn: all of the answer but its last token, which was never fed back",
        "an equal block behind another beginning",
    ],
)
def test_a_prompt_is_prefilled_from_where_it_parts_from_what_is_cached(first, second, cached):
    simulation = Simulation(prefix_cache=True)
    for request in (first, second):
        simulation.submit(request)
        simulation.finish()
    assert simulation.cached == cached


def test_of_cached_blocks_nobody_uses_the_one_longest_unused_is_handed_out_first():
    pool = BlockPool(4, BLOCK)
    blocks = pool.take(3)
    for number, block in enumerate(blocks):
        pool.keep(block, b"%d" % number)
    pool.give_back(blocks)  # the end of a prefix goes before its beginning
    pool.share([blocks[2]])
    pool.give_back([blocks[2]])
    assert pool.free == 3
    assert pool.take(2) == [blocks[1], blocks[0]]
    assert pool.find([b"0"]) == pool.find([b"1"]) == []
    assert pool.find([b"2"]) == [blocks[2]]


def test_a_block_enters_the_cache_only_when_its_ids_are_on_the_host():
    prompt = list(range(1, 10))
    simulation = Simulation(batch=2, prefill_batch=1, prefix_cache=True)
    simulation.submit(Request(0, prompt, 4))
    simulation.submit(Request(1, prompt, 4))
    simulation.step()
    simulation.step()
    assert simulation.cached == 0, "the first one's ids were still in flight"
    simulation.submit(Request(2, prompt, 4))
    simulation.finish()
    assert simulation.cached == 2 * BLOCK


def test_one_that_is_preempted_finds_its_own_blocks_again():
    simulation = Simulation(batch=2, blocks=8, prefix_cache=True)
    for number in range(2):
        simulation.submit(Request(number, [number + 1] * 6, 12))
    simulation.finish()
    assert simulation.preempted
    assert simulation.cached


@given(st.integers(1, 5000))
def test_a_bucket_is_never_more_than_half_empty(most):
    sizes = bucket_sizes(most)
    assert sizes[-1] == most
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))


def test_a_prompt_in_chunks_gives_its_first_token_with_the_last_of_them_and_holds_nobody_up():
    simulation = Simulation(batch=4, chunk_tokens=4, ahead=0)
    simulation.submit(Request(0, [1, 2, 3], 20))
    simulation.step()
    simulation.submit(Request(1, list(range(10)), 4))
    first, second, third = (simulation.scheduler.schedule() for _ in range(3))
    for batch in (first, second, third):
        assert batch.program.kind == "mixed"
        assert [each.request.id for each in batch.requests] == [0, 1], "who decodes goes on beside it"
    assert [batch.unfinished for batch in (first, second, third)] == [1, 1, 0]
    assert [batch.values["position_ids"][1:] for batch in (first, second, third)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_a_prompt_under_way_goes_on_before_another_begins_and_short_ones_share_a_step():
    simulation = Simulation(batch=6, chunk_tokens=8, prefill_batch=4, ahead=0)
    for number, length in enumerate((12, 2, 3, 2)):
        simulation.submit(Request(number, [number + 1] * length, 4))
    steps = [[(each.request.id) for each in simulation.scheduler.schedule().requests] for _ in range(3)]
    assert steps == [[0], [0, 1], [0, 1, 2, 3]], "4 + 4 tokens, padded; then those that decode, and the rest"


def test_whole_prompts_that_no_prefill_has_room_for_are_a_mixed_step():
    simulation = Simulation(batch=6, chunk_tokens=4096, prefill_batch=6, ahead=0)
    most = simulation.scheduler.config.prefill_tokens
    length = most // 4 + 1
    for number in range(4):
        simulation.submit(Request(number, [number + 1] * length, 1))
    batch = simulation.scheduler.schedule()
    assert (type(batch.program), len(batch.requests)) == (Mixed, 4)


def test_while_a_count_is_on_its_way_all_wait_for_the_host_or_go_on_with_the_device():
    in_a_row = {}
    for who in accept.POLICIES:
        simulation = Simulation(accept=who, ahead=1, prefill_batch=1)
        for number in range(2):
            simulation.submit(Request(number, [1, 2, 3], 24))
        in_a_row[who] = [simulation.scheduler.schedule() is not None for _ in range(4)]
    assert in_a_row == {"host": [True, True, False, False], "device": [True] * 4}, "prompts need no count"


def test_under_speculation_no_step_is_begun_for_a_request_that_has_all_its_tokens_under_way():
    simulation = Simulation(accept="device", ahead=1)
    simulation.submit(Request(0, [1, 2, 3], 3))
    steps = [simulation.scheduler.schedule() is not None for _ in range(5)]
    assert steps == [True, True, True, False, False], "each gives one token at least"
