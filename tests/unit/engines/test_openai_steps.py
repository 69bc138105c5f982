"""Which step of a server a chunk belongs to, told from the order in which chunks come."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines.openai.turns import Steps


def served(steps: Steps, places: dict[int, int], count: int, random: Random) -> list[dict[int, int]]:
    """The chunks of a server in lockstep: request r has its first one in model step `places[r]`, and `count`
    in all. Within a model step they come in any order. The step of each request's chunk, by model step."""
    found = []
    for model_step in range(max(places.values()) + count):
        now = [each for each, first in places.items() if first <= model_step < first + count]
        random.shuffle(now)
        found.append({each: steps.came(each) for each in now})
        for each in now:
            if model_step == places[each] + count - 1:
                steps.ended(each)
    return found


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(6, 12),
    st.randoms(use_true_random=False),
)
def test_steps_are_those_of_the_server_once_every_request_is_there(
    firsts: list[int], count: int, random: Random
) -> None:
    places = {request: first - min(firsts) for request, first in enumerate(firsts)}
    found = served(Steps(places), places, count, random)
    taken_in = max(places.values())
    for model_step, chunks in enumerate(found):
        for step in chunks.values():
            late = {model_step - taken_in, model_step - taken_in + 1}
            assert step == 0 if model_step < taken_in else step in late


@given(st.integers(1, 6), st.integers(2, 10))
def test_a_step_is_over_with_the_chunk_that_completes_it(requests: int, count: int) -> None:
    steps = Steps(range(requests))
    for number in range(count):
        for request in range(requests):
            assert steps.over == number
            assert steps.came(request) == number
        assert steps.over == number + 1


def test_a_step_does_not_wait_for_a_request_that_has_ended() -> None:
    steps = Steps([0, 1])
    for request in (0, 1, 0):
        steps.came(request)
    assert steps.over == 1
    steps.ended(1)
    assert steps.over == 2


def test_a_request_that_waits_until_another_ends_keeps_no_step_open() -> None:
    """As where a server takes in fewer than were sent."""
    steps = Steps([0, 1, 2])
    for request in (0, 1, 0, 1, 0):
        assert steps.came(request) == 0
    steps.ended(0)
    assert steps.over == 1
    assert steps.came(2) == 0
    assert steps.came(1) == 1
    assert steps.came(2) == 1
    assert steps.over == 2


def test_two_tokens_in_one_chunk_keep_the_steps_of_the_others() -> None:
    steps = Steps([0, 1])
    steps.came(0)
    steps.came(1)
    assert [steps.came(0), steps.came(0), steps.over] == [1, 2, 1]
    assert [steps.came(1), steps.over] == [1, 2]
