"""Lines with a knee: what is found of delays whose cost is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.harness.stats import knee

SIZES = np.array([100.0, 250.0, 500.0, 1000.0, 2500.0])  # us


def trial(
    slope: float,
    slack: float,
    random: np.random.Generator,
    noise_us: float = 200.0,
    turns: int = 20,
    of: np.ndarray = SIZES,
) -> tuple[np.ndarray, ...]:
    sizes = np.repeat(of, turns)
    costs = slope * np.maximum(0, sizes - slack) + noise_us * random.standard_t(3, len(sizes))
    return knee.points(sizes, costs, sizes)


@given(st.floats(0.5, 2.0), st.floats(0, 800))
def test_without_noise_slope_and_slack_are_found(slope: float, slack: float) -> None:
    costs = slope * np.maximum(0, SIZES - slack)
    line = knee.fit(SIZES, costs, np.ones(len(SIZES)))
    assert line.slack == pytest.approx(slack, abs=30)
    assert line.slope == pytest.approx(slope, rel=0.03)


def test_what_few_turns_say_weighs_little() -> None:
    line = knee.fit(SIZES, np.array([100, 250, 500, 1000, 3000.0]), np.array([100, 100, 100, 100, 0.1]))
    assert line.slope == pytest.approx(1, abs=0.01)


def test_what_is_hidden_at_every_size_has_no_knee_in_reach() -> None:
    random = np.random.default_rng(1)
    found = knee.over_trials([trial(1.0, 9000.0, random) for _ in range(6)])
    assert found.slack is None
    assert found.slack_low == SIZES.max()
    assert found.slope_low < 0 < found.slope_high
    assert abs(found.slope) < 0.05


def test_a_part_of_each_us_that_is_felt_is_not_said_to_be_hidden() -> None:
    sizes = np.repeat([300.0, 900.0, 1_700.0, 3_400.0], 20)
    noise = np.random.default_rng(3)

    def found(costs: np.ndarray, noise_us: float) -> knee.Knee:
        drawn = [costs + noise.normal(0, noise_us, len(sizes)) for _ in range(5)]
        return knee.over_trials([knee.points(sizes, each, sizes) for each in drawn])

    partly = found(0.25 * sizes, 5)
    assert partly.slope_low < 0.25 < partly.slope_high
    assert partly.slack == 0.0
    assert found(0.28 * np.maximum(0, sizes - 1_000), 5).slack is None  # the first 1,000 us are hidden
    assert found(0 * sizes, 30).slack is None


def test_one_delay_that_is_felt_tells_no_slope_and_is_not_said_to_be_hidden() -> None:
    random = np.random.default_rng(1)
    found = knee.over_trials([trial(1.0, 1500.0, random, 20.0) for _ in range(6)])
    assert (found.slack, found.slack_low) == (None, SIZES[-2])


@pytest.mark.parametrize(("slope", "slack"), [(1.0, 0.0), (1.0, 900.0), (1.6, 300.0), (0.6, 0.0)])
@pytest.mark.parametrize(("trials", "noise_us"), [(3, 20.0), (6, 20.0), (6, 200.0)])
def test_intervals_hold_the_truth_in_95_of_100_runs(
    slope: float, slack: float, trials: int, noise_us: float
) -> None:
    """Delays as a study chooses them: half and most of the slack, and three beyond it. Boots differ in it."""
    sizes = SIZES if slack < 100 else np.array([0.5 * slack, 0.9 * slack, *(slack + SIZES[[1, 2, 3]])])
    random = np.random.default_rng(2)
    held = np.zeros((400, 2), bool)
    for run in range(len(held)):
        boots = slack + 20 * random.normal(size=trials) if slack else np.zeros(trials)
        found = knee.over_trials([trial(slope, each, random, noise_us, 12, sizes) for each in boots])
        assert 0 <= found.slack_low <= found.slack <= found.slack_high
        held[run] = (
            found.slope_low <= slope <= found.slope_high,
            found.slack_low <= slack <= found.slack_high,
        )
    assert 0.92 <= held[:, 0].mean() <= 0.98
    assert 0.92 <= held[:, 1].mean() <= 0.995  # an end below 0 is 0


def test_a_rare_stall_decides_nothing() -> None:
    sizes = np.repeat(SIZES, 10)
    costs = sizes.copy()
    costs[::10] += 50_000
    line = knee.fit(*knee.points(sizes, costs, sizes))
    assert line.slope == pytest.approx(1, abs=0.02)
