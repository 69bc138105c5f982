"""Where a level moved: seen where it did, and hardly ever where it did not."""

from collections.abc import Callable

import numpy as np
import pytest

from overlap_bench.harness.stats.change_points import LEVEL, SHORTEST, change_points, scatter

Draw = Callable[[np.random.Generator, int], np.ndarray]
NOISES: dict[str, Draw] = {
    "normal": lambda random, n: random.standard_normal(n),
    "heavy-tailed": lambda random, n: random.standard_t(2, n),
}


def noise(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n)


def test_a_step_is_found_where_it_is_and_as_large_as_it_is() -> None:
    series = noise(60) + 3 * (np.arange(60) >= 40)
    (found,) = change_points(series)
    assert abs(found.index - 40) <= 1
    assert found.low < 3 < found.high
    assert found.shift == pytest.approx(series[found.index :].mean() - series[: found.index].mean())
    assert found.p < LEVEL


def test_a_level_that_came_and_went_is_two() -> None:
    moved = (np.arange(90) >= 30) & (np.arange(90) < 60)
    found = change_points(noise(90, 7) - 4 * moved)
    assert [abs(each.index - at) <= 1 for each, at in zip(found, (30, 60), strict=True)] == [True, True]
    assert found[0].shift < 0 < found[1].shift


def test_a_slow_creep_is_found() -> None:
    found = change_points(noise(60, 2) + 0.05 * np.arange(60))
    assert found
    assert all(each.shift > 0 for each in found)


def test_two_values_that_are_far_off_are_no_level() -> None:
    series = noise(60, 3)
    series[[20, 41]] = 1000
    assert change_points(series) == []
    series[-2:] = 1000
    assert change_points(series) == []


def test_nothing_is_said_of_a_short_series_and_the_shortest_is_long_enough() -> None:
    def halves(n: int) -> list[float]:
        return [*range(n // 2), *range(100, 100 + n - n // 2)]

    assert change_points(halves(SHORTEST - 1)) == []
    assert [each.index for each in change_points(halves(SHORTEST))] == [SHORTEST // 2]


def test_equal_values_are_one_level() -> None:
    assert change_points([1.0] * 50) == []
    assert [each.index for each in change_points([1.0] * 25 + [2.0] * 25)] == [25]


@pytest.mark.parametrize("draw", NOISES.values(), ids=NOISES)
def test_a_level_that_did_not_move_is_seen_to_move_no_more_often_than_it_says(draw: Draw) -> None:
    random = np.random.default_rng(4)
    runs = 3000
    wrong = sum(bool(change_points(draw(random, 40))) for _ in range(runs))
    assert wrong <= runs * LEVEL + 4 * (runs * LEVEL) ** 0.5


def test_the_scatter_is_that_within_levels() -> None:
    series = noise(400, 5) + 50 * (np.arange(400) >= 200)
    points = change_points(series)
    assert scatter(series, points) == pytest.approx(1, abs=0.1)
    assert scatter([1.0], []) is None
