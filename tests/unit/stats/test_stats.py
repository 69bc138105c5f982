"""The mathematics of harness/stats/paired.py: by hand, against scipy, by property, by simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from overlap_bench.harness.analysis import decision
from overlap_bench.harness.stats import distributions, paired, planning

positive = st.floats(1.0, 20.0)  # within float range once a two-block interval is exponentiated
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


def known(low: float, high: float, *, change: float | None = None, p: float = 0.001) -> paired.Effect:
    middle = (low + high) / 2 if change is None else change
    return paired.Effect("ratio", 6, 1.0, 1.0 + middle, middle, middle, low, high, 0.01, p)


# -- effect -----------------------------------------------------------------------------------------------


def test_effect_by_hand() -> None:
    # log ratios log(1.1), log(1.2): mean 0.138831, sd 0.061527, t(.975; 1) = 12.7062
    result = paired.effect([10.0, 10.0], [11.0, 12.0])
    assert result.before == pytest.approx(10.0)
    assert result.after == pytest.approx(math.sqrt(132.0))
    assert result.change == pytest.approx(math.sqrt(1.32) - 1)
    assert result.sd == pytest.approx(math.log(1.2 / 1.1) / math.sqrt(2))
    assert result.high == pytest.approx(math.exp(0.1388309 + 12.7062 * 0.0435057) - 1, rel=1e-4)


@given(pairs)
def test_effect_agrees_with_the_paired_t_test_of_scipy(values: list[tuple[float, float]]) -> None:
    before, after = zip(*values, strict=True)
    result = paired.effect(before, after)
    if result.sd is not None and result.sd > 1e-9:
        expected = scipy_stats.ttest_rel(np.log(after), np.log(before))
        interval = expected.confidence_interval(0.95)
        assert result.p == pytest.approx(expected.pvalue, rel=1e-6)
        # Not the log of what is shown: near -100% it has no digits left.
        assert result.low == pytest.approx(math.expm1(interval.low), rel=1e-4, abs=1e-9)
        assert result.high == pytest.approx(math.expm1(interval.high), rel=1e-4, abs=1e-9)


def test_difference_scale_takes_zero() -> None:
    result = paired.effect([0.0, 1.0, 2.0], [1.0, 3.0, 2.0], "difference")
    assert (result.before, result.after, result.delta, result.change) == (1.0, 2.0, 1.0, None)
    assert result.sd == pytest.approx(1.0)
    assert result.high == pytest.approx(1.0 + 4.302653 / math.sqrt(3), rel=1e-5)


def test_one_block_has_numbers_and_nothing_else() -> None:
    result = paired.effect([2.0], [1.0])
    assert result.change == pytest.approx(-0.5)
    assert (result.low, result.high, result.sd, result.p) == (None, None, None, None)
    assert decision.verdict(result, 0.01, "lower", is_time=True) is None


@pytest.mark.parametrize(
    ("before", "after"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0]), ([1.0], [math.nan])]
)
def test_impossible_blocks_are_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match=r"trial|ratio"):
        paired.effect(before, after)


def test_no_spread_is_the_limit_not_a_crash() -> None:
    assert paired.effect([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert paired.effect([1.0, 1.0], [2.0, 2.0]).p == 0.0


# -- verdict ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (-0.009, 0.009, 0.9, "same"),
        (-0.009, -0.003, 0.001, "same"),  # a change was detected, and is still the same
        (-0.012, -0.003, 0.001, "faster"),
        (0.003, 0.012, 0.001, "slower"),
        (-0.010, 0.005, 0.4, "undecided"),  # on the margin is not inside it
        (-0.03, 0.01, 0.2, "undecided"),
    ],
)
def test_verdict_order(low: float, high: float, p: float, expected: str) -> None:
    assert decision.verdict(known(low, high, p=p), 0.01, "lower", is_time=True) == expected


def test_a_secondary_is_decided_by_its_adjusted_p() -> None:
    clear = known(-0.05, -0.03, p=0.02)
    assert decision.verdict(clear, 0.01, "lower", is_time=True, p_adjusted=0.04) == "faster"
    assert decision.verdict(clear, 0.01, "lower", is_time=True, p_adjusted=0.06) == "undecided"


def test_detected_within_same() -> None:
    assert decision.detected(known(-0.009, -0.003, p=0.001))
    assert not decision.detected(known(-0.009, 0.003, p=0.2))


def test_a_difference_is_never_called_same() -> None:
    tiny = paired.effect([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "difference")
    assert decision.verdict(tiny, 0.01, "lower", is_time=True) == "undecided"


# -- several metrics, checks ------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    assert decision.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert decision.holm({}) == {}


def test_sign_flip_by_hand() -> None:
    assert paired.sign_flip([1.0, 1.0, 1.0, 1.0, 1.0]) == pytest.approx(2 / 32)  # why six blocks are needed
    assert paired.sign_flip([1.0, 2.0, -0.5]) == pytest.approx(4 / 8)  # |sum| >= 2.5: +++, ++- and mirrors
    assert paired.sign_flip([0.0, 0.0]) == 1.0


def test_sign_flip_drawn_is_close_to_scipy() -> None:
    values = np.random.default_rng(3).normal(0.4, 1.0, 15)
    exact = scipy_stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert paired.sign_flip(values) == pytest.approx(exact.pvalue, abs=0.01)


def test_sign_flip_disagrees_where_one_block_hides_what_all_agree_on() -> None:
    one_far = [1.0] * 7 + [20.0]  # t: p = .2; all eight have one sign: p = 2/256
    assert paired.sign_flip_disagrees(one_far)
    assert not paired.sign_flip_disagrees(one_far[1:])  # seven blocks: too few to disagree
    assert not paired.sign_flip_disagrees([1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.0])


# -- position, drift, planning ----------------------------------------------------------------------------


def test_uneven_orders_leave_a_part_of_the_position_effect_in_the_change() -> None:
    first = [True, False, False, False]
    differences = [0.02 - 0.01 if each else 0.02 + 0.01 for each in first]
    found = paired.position(differences, first)
    assert found.left == pytest.approx(np.mean(differences) - 0.02, rel=0.01)
    assert found.weakens(0.009)
    assert not found.weakens(0.011)
    unsure = paired.position([0.05, -0.04, 0.06, 0.02], first)
    assert not unsure.seen
    assert abs(unsure.left) > 0.005
    assert not unsure.weakens(0.01)  # the spread of the pairs alone comes to as much
    assert paired.position([0.0, 0.02], [True, False]) == paired.Position(
        pytest.approx(math.expm1(0.01)), None, None
    )


@given(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=3, max_size=12))
def test_the_position_of_two_arms_has_the_pooled_interval(drawn: list[tuple[float, bool]]) -> None:
    values, first = (np.array(each) for each in zip(*drawn, strict=True))
    found = paired.position(values, first)
    if first.all() or not first.any():
        assert found is None
        return
    sides = (values[~first], values[first])
    half = (sides[0].mean() - sides[1].mean()) / 2
    freedom = len(values) - 2
    pooled = sum(((each - each.mean()) ** 2).sum() for each in sides) / freedom
    error = (pooled * sum(1 / len(each) for each in sides)) ** 0.5 / 2
    reach = scipy_stats.t.ppf(0.975, freedom) * error
    assert (found.change, found.low, found.high) == pytest.approx(
        (math.expm1(half), math.expm1(half - reach), math.expm1(half + reach)), abs=1e-9
    )


@given(st.integers(2, 5), st.floats(-0.2, 0.2), st.randoms(use_true_random=False))
def test_the_effect_of_a_place_comes_out_whatever_arms_and_blocks_are(
    arms: int, effect: float, random: Any
) -> None:
    orders = [random.sample(range(arms), arms) for _ in range(4)]
    orders.append(orders[0][::-1])  # so that not all are one
    places = np.argsort(orders) / (arms - 1)
    levels = np.random.default_rng(arms).normal(size=(5, 1)) + np.random.default_rng(9).normal(size=arms)
    found = paired.position_of_several(levels + effect * places, places)
    assert found.change == pytest.approx(math.expm1(effect), abs=1e-9)
    assert paired.position_of_several(levels, np.repeat(places[:1], 5, axis=0)) is None


def test_drift_is_the_line_through_the_mean_logs() -> None:
    before, after = [10.0, 12.0, 11.0, 13.0, 12.5], [20.0, 22.0, 19.0, 25.0, 24.0]
    line = scipy_stats.linregress(np.arange(5), np.log([before, after]).mean(axis=0))
    found = paired.drift(before, after)
    assert found.change == pytest.approx(math.expm1(4 * line.slope))
    assert found.p == pytest.approx(line.pvalue)


@pytest.mark.parametrize(("sd", "expected"), [(0.005, 5), (0.01, 10), (0.02, 34), (0.03, 73)])
def test_fixed_plan_agrees_with_the_known_table(sd: float, expected: int) -> None:
    assert planning.fixed_plan(sd, 0.01) == expected


@given(st.floats(0.002, 0.05), st.integers(3, 20))
def test_blocks_needed_is_a_range_about_the_plan(sd: float, blocks: int) -> None:
    low, high = planning.blocks_needed(sd, blocks, 0.01)
    assert 2 <= low <= planning.fixed_plan(sd, 0.01) <= high


@given(st.floats(0.002, 0.05), st.integers(2, 30))
def test_the_smallest_detectable_effect_is_detected_in_four_of_five_runs(sd: float, blocks: int) -> None:
    smallest = planning.smallest_detectable(sd, blocks)
    assert planning.detection_power(smallest / sd, blocks) == pytest.approx(0.8, abs=1e-3)
    assert smallest > paired.half_width(sd, blocks) * 0.9  # what is detected must at least leave the interval


def test_the_blocks_that_an_open_question_needs_decide_it_in_four_of_five_fresh_runs() -> None:
    """The first runs left open on which side of 0 the mean is, wherever it is."""
    random, decided = np.random.default_rng(4), []
    while len(decided) < 300:
        mean = random.uniform(-3, 3)
        first = random.normal(mean, 1, 6)
        low, high = bounds(first)
        if low > 0 or high < 0:
            continue
        needed = planning.blocks_to_decide(abs(first.mean()), first.std(ddof=1), 6, 0.05, 100)
        if needed is not None:
            low, high = bounds(random.normal(mean, 1, needed))
            decided.append(low > 0 or high < 0)
    assert np.mean(decided) == pytest.approx(0.8, abs=0.07)


def bounds(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """At 95% each."""
    half = paired.half_width(float(values.std(ddof=1)), len(values), 0.1)
    return float(values.mean()) - half, float(values.mean()) + half


def test_no_number_of_blocks_decides_what_lies_at_the_limit() -> None:
    assert planning.blocks_to_decide(0.0, 0.01, 6, 0.05, 100) is None
    assert planning.blocks_to_decide(0.02, 0.01, 6, 0.05, 100) == 4
    assert planning.blocks_to_decide(0.001, 0.0, 6, 0.05, 100) == 2


def test_unpaired_agrees_with_welch_of_scipy() -> None:
    random = np.random.default_rng(2)
    before, after = np.exp(random.normal(0, 0.01, 6)), np.exp(random.normal(0.02, 0.03, 9))
    found = paired.unpaired(before, after)
    expected = scipy_stats.ttest_ind(np.log(after), np.log(before), equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert (math.log1p(found.low or 0), math.log1p(found.high or 0)) == pytest.approx(tuple(interval))
    assert found.change == pytest.approx(found.after / found.before - 1)
    assert (found.sd, found.blocks) == (None, 6)


def test_unpaired_at_the_ends() -> None:
    one = paired.unpaired([2.0], [1.0, 1.1])
    assert one.change is not None
    assert (one.low, one.high, one.p) == (None, None, None)
    still = paired.unpaired([1.0, 1.0], [2.0, 2.0])
    assert (still.low, still.p) == (pytest.approx(1.0), 0.0)
    assert paired.unpaired([0.0, 1.0], [1.0, 3.0], "difference").delta == 1.5


@pytest.mark.parametrize("freedom", [1, 2.5, 5, 40])
def test_the_distributions_are_those_of_scipy(freedom: float) -> None:
    values = np.linspace(0.01, 0.99, 15)
    assert distributions.t_quantile(values, freedom) == pytest.approx(scipy_stats.t.ppf(values, freedom))
    assert distributions.t_tail(values, freedom) == pytest.approx(scipy_stats.t.sf(values, freedom))
    assert distributions.chi2_quantile(values, freedom) == pytest.approx(
        scipy_stats.chi2.ppf(values, freedom)
    )
    assert distributions.normal_tail(values) == pytest.approx(scipy_stats.norm.sf(values))
