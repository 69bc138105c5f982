"""When a run may stop: the levels, the rule on the harness's own objects, and error rates by simulation."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.analysis.values import reason_to_stop
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import Arm, Design
from overlap_bench.harness.plan.settings import make_gate
from overlap_bench.harness.stats import stopping
from overlap_bench.harness.stats.stopping import Until
from overlap_bench.harness.workload.workload import Workload
from tests.support import simulated_runs as simulated

RUNS = 5_000
ARMS = tuple(
    Arm(name=name, engine="e", options=api.EngineOptions(), toggles={}) for name in ("before", "after")
)


@pytest.fixture(scope="module")
def decided() -> Until:
    return stopping.until_decided(20)


def design(until: Until | None, blocks: int = 20) -> Design:
    return Design(name="x", arms=ARMS, workload=Workload(), blocks=blocks, until=until)


def changed(*changes: float) -> list[Values]:
    """A block per change of the primary, a fraction."""
    return [{"before": {"tpot_ms_p50": 4.0}, "after": {"tpot_ms_p50": 4.0 * (1 + each)}} for each in changes]


def at_most(rate: float) -> float:
    """A simulated rate may be this high by chance: three standard errors above."""
    return rate + 3 * math.sqrt(rate * (1 - rate) / RUNS)


# -- the plan ---------------------------------------------------------------------------------------------


def test_the_looks() -> None:
    assert stopping.looks(20) == (6, 8, 10, 12, 14, 16, 18, 20)
    assert stopping.looks(9) == (6, 8, 9)
    assert stopping.looks(6) == (6,)


def test_the_levels_of_twenty_blocks_are_the_known_ones(decided: Until) -> None:
    known = (0.0026, 0.0050, 0.0079, 0.0112, 0.0146, 0.0182, 0.0219, 0.0256)
    assert decided.levels == pytest.approx(known, abs=2e-4)


def test_a_single_look_is_the_fixed_test() -> None:
    assert stopping.until_decided(6).levels == (0.05,)


@settings(max_examples=3)
@given(st.integers(7, 16))
def test_later_looks_get_more_and_none_gets_all(most: int) -> None:
    levels = stopping.until_decided(most).levels
    assert list(levels) == sorted(levels)
    assert 0 < levels[0] < levels[-1] < 0.05 < sum(levels)


@pytest.mark.parametrize("most", [5, 0, -1, 101])
def test_an_impossible_number_of_blocks_is_refused(most: int) -> None:
    for plan in (lambda: stopping.until_decided(most), lambda: stopping.until_precise(0.01, most)):
        with pytest.raises(api.BadSetting, match=f"needs --max-trials from 6 to 100, not {most}"):
            plan()


def test_an_interval_has_the_level_of_its_look(decided: Until) -> None:
    plan = design(decided)
    assert plan.alpha(8) == plan.alpha(9) == decided.levels[1]
    assert plan.alpha(20) == decided.levels[-1]
    assert plan.alpha(3) == decided.levels[0]  # not yet at a look: the strictest
    assert design(None).alpha(3) == 0.05


# -- the rule ---------------------------------------------------------------------------------------------

CLEAR = [0.050, 0.052, 0.048, 0.051, 0.049, 0.050]
TINY = [0.0001, -0.0001, 0.0002, -0.0002, 0.0001, -0.0001]
WIDE = [0.09, -0.08, 0.07, -0.09, 0.08, -0.07] * 4


def test_a_clear_change_stops_at_the_first_look_and_not_before(decided: Until) -> None:
    plan = design(decided)
    assert all(reason_to_stop(plan, changed(*CLEAR[:n])) is None for n in range(1, 6))
    reason = reason_to_stop(plan, changed(*CLEAR))
    assert reason == "decided at 6 of at most 20 trials: tpot_ms_p50 is slower"


def test_no_change_within_the_margin_stops_too(decided: Until) -> None:
    reason = reason_to_stop(design(decided), changed(*TINY))
    assert reason == "decided at 6 of at most 20 trials: tpot_ms_p50 is same"


def test_nothing_is_looked_at_between_two_looks(decided: Until) -> None:
    hesitant = [*CLEAR[:5], 0.2, 0.05]  # undecided at 6; clear enough at 7, where nobody looks
    plan = design(decided)
    assert reason_to_stop(plan, changed(*hesitant[:6])) is None
    assert reason_to_stop(plan, changed(*CLEAR, 0.05)) is None


def test_what_stays_unclear_ends_at_the_most_blocks(decided: Until) -> None:
    plan = design(decided)
    assert reason_to_stop(plan, changed(*WIDE[:18])) is None
    assert reason_to_stop(plan, changed(*WIDE[:20])) == (
        "20 trials, the most allowed: tpot_ms_p50 is undecided"
    )


def test_precision_looks_at_the_width_alone() -> None:
    plan = design(stopping.until_precise(0.01, 8), 8)
    reason = reason_to_stop(plan, changed(*CLEAR))
    assert reason.startswith("decided at 6 of at most 8 trials: half-width 0.")
    assert reason.endswith("%, within 1%")
    assert reason_to_stop(plan, changed(*WIDE[:7])) is None
    end = reason_to_stop(plan, changed(*WIDE[:8]))
    assert end.startswith("8 trials, the most allowed: half-width")
    assert end.endswith("not within 1%")


def test_a_gate_stops_once_it_passes_or_fails(decided: Until) -> None:
    plan = design(decided)
    plan = msgspec.structs.replace(plan, gate=make_gate(0.02, plan.until))
    assert reason_to_stop(plan, changed(*CLEAR)) == "decided at 6 of at most 20 trials: the gate says fail"
    harmless = [0.010, 0.011, 0.009, 0.010, 0.011, 0.009]  # a change for sure, and within the limit
    assert reason_to_stop(plan, changed(*harmless)) == "decided at 6 of at most 20 trials: the gate says pass"
    assert reason_to_stop(plan, changed(*WIDE[:18])) is None
    end = reason_to_stop(plan, changed(*WIDE[:20]))
    assert end == "20 trials, the most allowed: the gate says undecided"


def test_a_fixed_run_never_looks() -> None:
    plan = design(None, 8)
    assert reason_to_stop(plan, changed(*CLEAR)) is None
    assert reason_to_stop(plan, changed(*CLEAR, 0.05, 0.05)) == "all 8 trials done"
    assert reason_to_stop(design(None, 1), changed(0.05)) == "its one trial done"


# -- error rates ------------------------------------------------------------------------------------------


def test_the_simulated_rules_are_those_of_the_harness(decided: Until) -> None:
    random = np.random.default_rng(4)
    for shift in (0.0, 0.02):
        some = simulated.differences(simulated.normal, random, 20, 20) + shift
        simulated.agree(some, decided, simulated.SD)
        simulated.agree(some, stopping.until_precise(0.006, 20), simulated.SD)


BOUNDS = {name: 0.06 if name == "period of 4 boots" else 0.05 for name in simulated.NOISES}  # stats.md


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items(), ids=BOUNDS)
def test_false_alarms_stay_within_their_bounds(name: str, bound: float, decided: Until) -> None:
    noise, random = simulated.NOISES[name], np.random.default_rng(5)
    pairs = simulated.differences(noise, random, RUNS, 20)
    assert simulated.sequential(pairs, decided, simulated.NEVER_SAME).detected <= at_most(bound)
    precise = stopping.until_precise(0.6 * simulated.SD, 20)
    assert simulated.sequential(pairs, precise, simulated.NEVER_SAME).detected <= at_most(bound)
    assert simulated.fixed(pairs, 6, simulated.NEVER_SAME).detected <= at_most(bound)
