"""Which commit changed a metric: the posterior, what is measured next, and how often it errs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_bench.harness.stats import bisection
from overlap_bench.harness.stats.bisection import Posterior, Trial

NOISE = st.floats(0.001, 0.02)
SEEDS = st.integers(0, 10_000)


def stepping(commits: int, *changed: int, heights: tuple[float, ...] = (1.0,)) -> np.ndarray:
    """Levels by place: `heights` from each of these commits on."""
    levels = np.zeros(commits + 1)
    for place, height in zip(changed, heights, strict=True):
        levels[place:] = height
    return levels


def trials(levels: np.ndarray, arm: float, seed: int, places: list[int], effect: float = 0.02) -> list[Trial]:
    measure = bisection.simulated(np.random.default_rng(seed), effect * levels, arm)
    return [measure(place) for place in (0, 0, 0, 0, *places)]


def searched(levels: np.ndarray, arm: float, seed: int) -> Posterior:
    measure = bisection.simulated(np.random.default_rng(seed), 0.02 * levels, arm)
    done = [measure(0) for _ in range(6)]
    _, known = bisection.search(done, len(levels) - 1, measure, np.ones(len(levels)), 150)
    return known


@given(st.integers(1, 40), NOISE, SEEDS, st.lists(st.integers(1, 39), max_size=12))
@settings(max_examples=40)
def test_chances_add_up(commits: int, arm: float, seed: int, places: list[int]) -> None:
    inside = [1 + place % (commits - 1) for place in places] if commits > 1 else []
    known = bisection.posterior(trials(stepping(commits, 1 + seed % commits), arm, seed, inside), commits)
    assert known.steps.sum() == pytest.approx(1)
    assert known.commits[0] == 0
    assert known.commits.sum() == pytest.approx(known.steps @ [1, 2, 3])
    assert known.levels.sum(axis=1) == pytest.approx(np.ones(commits + 1), abs=1e-6)
    assert known.levels[0, bisection.AS_GOOD] == pytest.approx(1)
    assert known.levels[-1, bisection.AS_BAD] == pytest.approx(1)
    assert (known.levels >= 0).all()
    assert 0 < known.claim <= 1 + 1e-9


@given(st.integers(2, 40), NOISE, SEEDS, st.floats(0.1, 50), st.booleans())
@settings(max_examples=30)
def test_the_scale_of_the_metric_and_its_direction_change_nothing(
    commits: int, arm: float, seed: int, factor: float, turned: bool
) -> None:
    """Log ratios of a tenth, or of fifty times the size, and of a metric that falls."""
    factor = -factor if turned else factor
    seen = trials(stepping(commits, 1 + seed % commits), arm, seed, [1, commits // 2, 1])
    scaled = [Trial(each.commit, factor * each.effect, factor * each.change) for each in seen]
    one, other = (bisection.posterior(each, commits) for each in (seen, scaled))
    assert other.commits == pytest.approx(one.commits, abs=1e-6)
    assert other.claim == pytest.approx(one.claim, abs=1e-6)
    assert other.effect == pytest.approx(factor * one.effect)
    assert bisection.information(other) == pytest.approx(bisection.information(one), abs=1e-6)


@given(SEEDS, st.permutations(range(9)))
@settings(max_examples=15)
def test_the_order_of_trials_changes_nothing(seed: int, order: list[int]) -> None:
    seen = trials(stepping(16, 5), 0.005, seed, [8, 4, 6, 5, 4])
    one, other = (bisection.posterior(each, 16) for each in (seen, [seen[place] for place in order]))
    assert other.commits == pytest.approx(one.commits, abs=1e-9)


@given(st.integers(4, 60), SEEDS)
@settings(max_examples=20)
def test_more_trials_beside_the_change_concentrate_on_it(commits: int, seed: int) -> None:
    place = 2 + seed % (commits - 2)
    few, many = (
        bisection.posterior(
            trials(stepping(commits, place), 0.004, seed, [place - 1, place][:2] * count), commits
        )
        for count in (1, 8)
    )
    assert many.commits[place] > 0.95
    assert many.commits[place] >= few.commits[place] - 0.01


def test_a_long_span_that_was_measured_all_over_is_told_too() -> None:
    """What speaks against each level of so many commits is more than numbers hold."""
    known = bisection.posterior(trials(stepping(70, 47), 0.002, 1, [*range(1, 70)] * 2), 70)
    assert known.best == ((47, 47),)
    assert known.claim > 0.95
    assert known.commits.sum() == pytest.approx(known.steps @ [1, 2, 3])


def test_commits_between_two_that_were_measured_share_what_is_left() -> None:
    known = bisection.posterior(trials(stepping(20, 13), 0.002, 1, [10, 15]), 20)
    assert known.commits[11:16] == pytest.approx(np.full(5, known.commits[11]))
    assert known.best == ((11, 15),)
    assert not known.found()
    assert not known.found(skipped=(11, 12, 13))
    assert known.is_sure(skipped=(11, 12, 13, 14))


def test_the_next_one_halves_what_is_open_and_is_worth_its_minutes() -> None:
    known = bisection.posterior(trials(stepping(64, 50), 0.002, 1, []), 64)
    assert bisection.following(known, np.ones(65)) == 32
    assert bisection.following(known, np.ones(65), skipped=(32,)) in (31, 33)
    dear = np.ones(65)
    dear[20:45] = 10.0
    assert bisection.following(known, dear) in (19, 45)
    assert bisection.following(known, np.ones(65), skipped=range(1, 64)) is None


def test_bad_alone_needs_no_search() -> None:
    known = bisection.posterior(trials(stepping(1, 1), 0.002, 1, []), 1)
    assert known.found()
    assert known.best == ((1, 1),)
    assert bisection.following(known, np.ones(2)) is None


@pytest.mark.parametrize("heights", [(0.5, 1.0), (1.75, 1.0), (-1.0, 1.0)])
def test_a_change_in_two_steps_is_told_as_two(heights: tuple[float, float]) -> None:
    """Also one that went too far, and one the other way first."""
    known = searched(stepping(64, 20, 45, heights=heights), 0.002, 3)
    assert known.best == ((20, 20), (45, 45))
    assert known.found()
    assert known.steps[1] > 0.9


def test_a_change_that_came_and_went_is_told_where_it_was_seen() -> None:
    known = searched(stepping(64, 10, 40, 55, heights=(1.0, 0.0, 1.0)), 0.002, 3)
    assert known.best == ((10, 10), (40, 40), (55, 55))
    assert known.found()


def test_no_long_stretch_goes_unmeasured() -> None:
    """Else a change that came and went there would be taken for none."""
    known = searched(stepping(64, 3), 0.001, 1)
    assert known.best == ((3, 3),)
    assert max(np.diff(known.bounds)) <= 16


def test_one_trial_that_is_far_off_does_not_decide() -> None:
    seen = trials(stepping(16, 9), 0.002, 1, [8, 8, 8, 9, 9, 9])
    odd = [*seen, Trial(8, 0.02, 0.06)]
    assert bisection.posterior(odd, 16).commits[9] > 0.9


@pytest.mark.parametrize(("arm", "names"), [(0.0035, 0.97), (0.007, 0.94)])
def test_where_it_is_sure_it_is_right(arm: float, names: float) -> None:
    """Fewer runs than in experiments/validation/bisections.py, and allowed as much as so few may err."""
    random = np.random.default_rng(5)
    right = []
    for seed, place in enumerate(random.integers(1, 65, 40)):
        known = searched(stepping(64, int(place)), arm, seed)
        assert known.found()
        right.append(known.best == ((place, place),))
    assert np.mean(right) >= names - 0.05


def test_noise_of_a_commit_beside_the_ends_is_what_the_model_takes_it_for() -> None:
    measure = bisection.simulated(np.random.default_rng(1), 0.02 * stepping(4, 3), 0.005)
    u, v = np.array([(each.effect, each.change - each.effect / 2) for each in map(measure, [2] * 4000)]).T
    assert v.std() / u.std() == pytest.approx(bisection.OF_V, rel=0.05)


def test_without_any_noise_commits_that_differ_a_little_are_alike() -> None:
    seen = [Trial(0, 0.02)] * 4
    known = bisection.posterior([*seen, Trial(8, 0.02, 0.0006), Trial(9, 0.02, 0.0197)], 16)
    assert known.best == ((9, 9),)
    assert known.claim > 0.9


def test_a_commit_that_is_odd_by_itself_leaves_all_else_possible() -> None:
    known = bisection.posterior(trials(stepping(16, 5), 0.001, 1, [*[4, 5] * 4, *[10] * 4]), 16)
    odd = [*trials(stepping(16, 5), 0.001, 1, [4, 5] * 4), *trials(stepping(16, 11), 0.001, 1, [10] * 40)]
    assert known.steps[0] > 0.9
    assert bisection.posterior(odd, 16).steps[0] > 1e-20


def test_a_commit_is_named_from_its_posterior_on() -> None:
    known = bisection.posterior(trials(stepping(16, 9), 0.002, 1, [8, 9]), 16)
    assert [replace(known, claim=claim).is_sure(()) for claim in (0.94, 0.96)] == [False, True]


def test_equal_ends_are_said_to_be_equal() -> None:
    random = np.random.default_rng(2)
    said = []
    for sd in np.tile([0.002, 0.01, 0.02], 20):
        effects: list[float] = []
        while (found := bisection.ends(effects, 0.01)).verdict == "open":
            effects.append(float(random.normal(0, sd)))
        said.append(found.verdict)
    assert said.count("different") <= 2


def test_ends_are_looked_at_where_it_was_declared() -> None:
    clear = [0.05, 0.051, 0.049, 0.05]
    assert bisection.ends(clear[:3], 0.01).verdict == "open"
    assert bisection.ends([0.078, 0.078, 0.122, 0.122], 0.01).verdict == "open"  # once, 1% would do
    assert bisection.ends(clear, 0.01).verdict == "different"
    open_ = bisection.ends([0.02, -0.02, 0.02, -0.01], 0.01)
    assert open_.verdict == "open"
    assert bisection.ends([0.02, -0.02, 0.02, -0.01, 0.5], 0.01) == open_  # between two looks
    assert bisection.ends([0.02, -0.02] * 16, 0.01).verdict == "equal"  # at the last look


def test_a_search_is_foretold() -> None:
    quiet, loud = (bisection.forecast(trials(stepping(32, 1), arm, 1, []), 32) for arm in (0.001, 0.01))
    assert quiet.shape == (bisection.FORETOLD, 2)
    assert 5 <= np.median(quiet[:, 0]) <= 9
    assert np.median(loud[:, 0]) > np.median(quiet[:, 0]) + 2
    assert (loud[:, 1] <= loud[:, 0]).all()
