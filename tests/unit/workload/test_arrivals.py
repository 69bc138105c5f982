"""When requests are due, and how long they are: against the distributions that they are drawn from."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as distributions

from overlap_bench.harness.workload import lengths
from overlap_bench.harness.workload.arrivals import ARRIVALS
from overlap_bench.harness.workload.lengths import PURPOSES, stream
from overlap_bench.harness.workload.plan import check, plan
from overlap_bench.harness.workload.workload import Workload
from tests.support.refusals import refusal

MANY = 20_000
SEEDS = (1, 2, 3)


def due_s(seed: int, **options: object) -> np.ndarray:
    """Due times in seconds, of requests without a tokenizer."""
    workload = Workload(pretok=False, **{"num_requests": MANY, **options})  # type: ignore[arg-type]
    check(workload)
    random = stream(seed, "arrivals")
    return np.array(ARRIVALS[workload.arrival].offsets(workload, random)) / 1e9


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"arrival": "poisson"}, 1.0),
        ({"arrival": "gamma"}, 1.0),
        ({"arrival": "gamma", "burstiness": 0.25}, 0.25),
        ({"arrival": "gamma", "burstiness": 4.0}, 4.0),
    ],
)
def test_intervals_are_those_of_the_distribution(options: dict[str, object], shape: float, seed: int) -> None:
    rate = 50.0
    intervals = np.diff(due_s(seed, rate=rate, **options))
    expected = distributions.gamma(shape, scale=1 / (rate * shape))
    # 1 ns is the grid; a shape of 0.25 has intervals below it.
    assert distributions.kstest(intervals, expected.cdf).pvalue > 0.001
    assert intervals.mean() == pytest.approx(1 / rate, rel=5 / (shape * MANY) ** 0.5)
    assert intervals.std() / intervals.mean() == pytest.approx(shape**-0.5, rel=0.06)
    lag = np.corrcoef(intervals[1:], intervals[:-1])[0, 1]
    assert abs(lag) < 4 / MANY**0.5


@pytest.mark.parametrize("arrival", ["poisson", "gamma", "constant"])
def test_the_first_request_is_due_at_once_and_time_never_goes_back(arrival: str) -> None:
    due = due_s(1, arrival=arrival, rate=1000.0)
    assert due[0] == 0
    assert (np.diff(due) >= 0).all()


def test_a_ramp_grows_linearly_from_request_to_request() -> None:
    gaps = np.mean([np.diff(due_s(seed, arrival="poisson", rate=100.0, ramp_up="20", num_requests=11))
                    for seed in range(4000)], axis=0)  # fmt: skip
    expected = 20 + (100 - 20) * np.arange(1, 11) / 10  # the gap before request i has the rate of request i
    assert 1 / gaps == pytest.approx(expected, rel=0.08)


def test_a_constant_arrival_is_even_at_any_rate_and_along_a_ramp() -> None:
    assert due_s(1, arrival="constant", rate=3.0, num_requests=7) == pytest.approx(np.arange(7) / 3, abs=1e-9)
    ramp: dict[str, object] = {"rate": 100.0, "ramp_up": "20", "num_requests": 11}
    steady = due_s(1, arrival="gamma", burstiness=1e9, **ramp)
    ramped = {tuple(due_s(seed, arrival="constant", **ramp)) for seed in SEEDS}
    assert [*ramped.pop()] == pytest.approx(steady, rel=1e-3)
    assert not ramped  # nothing of it is drawn


def test_a_ramp_can_end_before_the_last_request() -> None:
    due = [due_s(seed, arrival="poisson", rate=100.0, ramp_up="20:3", num_requests=8) for seed in range(4000)]
    gaps = np.diff(due).mean(axis=0)
    assert 1 / gaps == pytest.approx([60, 100, 100, 100, 100, 100, 100], rel=0.08)


POISSON = {"arrival": "poisson", "rate": 5.0}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"arrival": "poisson"}, "arrival=poisson needs a rate"),
        ({"arrival": "gamma", "burstiness": 2.0}, "arrival=gamma needs a rate"),
        ({"arrival": "constant"}, "arrival=constant needs a rate"),
        ({"arrival": "constant", "rate": 1e-6}, "are not all due within a day"),
        ({"arrival": "poisson", "rate": 0.0}, "rate must be above 0, not 0"),
        ({"arrival": "poisson", "rate": float("inf")}, "rate must be above 0, not inf"),
        ({"arrival": "gamma", "rate": 5.0, "burstiness": -1.0}, "burstiness must be above 0, not -1"),
        ({"arrival": "poisson", "rate": 5.0, "burstiness": 2.0}, "applies only with arrival=gamma"),
        ({"rate": 5.0}, "rate applies only with arrival=poisson, gamma, constant or trace, not fixed"),
        ({"arrival": "burst", "ramp_up": "2"}, "applies only with arrival=poisson, gamma or constant"),
        ({**POISSON, "ramp_up": "slow"}, "ramp_up needs START or START:REQUESTS, not 'slow'"),
        ({**POISSON, "ramp_up": "0"}, "ramp_up must start from a rate above 0, not 0"),
        ({**POISSON, "ramp_up": "1:1"}, "at least 2 requests"),
        ({**POISSON, "ramp_up": "1:99"}, "ramp_up=1:99 is longer than num_requests=64"),
        ({"arrival": "possion", "rate": 5.0}, "unknown arrival 'possion'; did you mean poisson?"),
    ],
)  # fmt: skip
def test_an_arrival_that_cannot_be_is_refused(options: dict[str, object], complaint: str) -> None:
    assert complaint in refusal(lambda: check(Workload(**options)))


# ---------------------------------------------------------------------------------------------------------
# Lengths


def drawn(value: int | str, seed: int = 1, count: int = MANY) -> list[int]:
    return lengths.parse(value, "input_tokens").draw(count, stream(seed, "input_tokens"))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_lengths_are_equally_likely(seed: int) -> None:
    found = drawn("uniform:16:47", seed)
    assert (min(found), max(found)) == (16, 47)
    assert distributions.chisquare(np.bincount(found)[16:]).pvalue > 0.001


@pytest.mark.parametrize("seed", SEEDS)
def test_normal_lengths_are_normal(seed: int) -> None:
    found = np.array(drawn("normal:200:30", seed))
    spread = found + stream(seed, "leads").uniform(-0.5, 0.5, MANY)  # undoes the rounding
    assert distributions.kstest(spread, distributions.norm(200, 30).cdf).pvalue > 0.001
    assert lengths.parse("normal:200:30", "input_tokens").most == 320  # 4 SD


@given(st.floats(1, 500), st.floats(0.1, 500), st.integers(0, 9))
def test_no_draw_is_longer_than_the_most_or_shorter_than_a_token(mean: float, sd: float, seed: int) -> None:
    of = lengths.parse(f"normal:{mean}:{sd}", "input_tokens")
    found = of.draw(50, stream(seed, "input_tokens"))
    assert min(found) >= 1
    assert max(found) <= of.most


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("six", "input_tokens needs a number, uniform:LOW:HIGH or normal:MEAN:SD, not 'six'"),
        ("uniform:1", "input_tokens needs a number, uniform:LOW:HIGH or normal:MEAN:SD, not 'uniform:1'"),
        ("uniform:1:x", "not 'uniform:1:x'"),
        ("unifrom:1:2", "unknown distribution of input_tokens 'unifrom'; did you mean uniform?"),
        ("uniform:64:16", "input_tokens=uniform:64:16: LOW is above HIGH"),
        ("uniform:0:16", "input_tokens=uniform:0:16: LOW and HIGH are numbers of tokens, at least 1"),
        ("uniform:-5:16", "at least 1"),
        ("uniform:1.5:16", "numbers of tokens"),
        ("normal:64:-3", "input_tokens=normal:64:-3: MEAN must be at least 1 and SD above 0"),
        ("normal:nan:3", "MEAN must be at least 1"),
        ("-3", "input_tokens must be at least 1, not -3"),
        (0, "input_tokens must be at least 1, not 0"),
    ],
)
def test_lengths_that_cannot_be_are_refused(value: int | str, complaint: str) -> None:
    assert complaint in refusal(lambda: check(Workload(input_tokens=value)))


# ---------------------------------------------------------------------------------------------------------
# Independence


def test_streams_of_different_purposes_and_seeds_are_unrelated() -> None:
    def correlations(streams: Sequence[np.ndarray]) -> list[float]:
        return [abs(np.corrcoef(*pair)[0, 1]) for pair in combinations(streams, 2)]

    purposes = [stream(1, purpose).random(MANY) for purpose in PURPOSES]
    seeds = [stream(seed, "arrivals").random(MANY) for seed in range(6)]
    keys = [stream(1, "trace", key).random(MANY) for key in (0, 1, 2, 2**40)]
    for family in (purposes, seeds, keys):
        assert max(correlations(family)) < 4.5 / MANY**0.5


ASKED = {"prompts": "english", "pretok": False, "num_requests": 16, "arrival": "poisson", "rate": 20.0,
         "max_new_tokens": "uniform:4:40"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"rate": 40.0, "ramp_up": "2"}, ("prompt", "max_new_tokens")),
        ({"arrival": "burst", "rate": None}, ("prompt", "max_new_tokens")),
        ({"max_new_tokens": "normal:64:9"}, ("prompt", "offset_ns")),
        ({"prompts": None}, ("offset_ns", "max_new_tokens")),
        ({"num_requests": 32}, ("prompt", "offset_ns", "max_new_tokens")),  # the first 16
    ],
)
def test_changing_one_option_leaves_the_others_numbers_alone(
    change: dict[str, object], kept: tuple[str, ...]
) -> None:
    before = plan(Workload(**ASKED), 5, "", 512)  # type: ignore[arg-type]
    after = plan(Workload(**{**ASKED, **change}), 5, "", 512)  # type: ignore[arg-type]
    for name in ("prompt", "offset_ns", "max_new_tokens"):
        same = [getattr(each, name) for each in before] == [getattr(each, name) for each in after[:16]]
        assert same == (name in kept)
