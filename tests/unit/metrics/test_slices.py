"""What is made of turns: slices, their pairs, and the step that two arms differ in."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines.api import STEP_COLUMNS
from overlap_bench.harness.metrics import definitions, slices
from overlap_bench.harness.metrics.definitions import SLICED

MS = 1_000_000


def steps_of(ends_ms: list[float], kinds: list[str] | None = None, batch: int = 4) -> pd.DataFrame:
    """Step records whose programs end at these times and take half a ms."""
    ends = np.array([round(end * MS) for end in ends_ms])
    return pd.DataFrame(
        dict.fromkeys(STEP_COLUMNS, -1)
        | {
            "step": np.arange(100, 100 + len(ends)),
            "kind": kinds or ["decode"] * len(ends),
            "batch": batch,
            "tokens": batch,
            "device_end_ns": ends,
            "device_ns": MS // 2,
        }
    )


def turns_of(*spans_ms: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "parked_ns": MS,
                "parked_cpu_ns": MS // 100,
                "taken_ns": round(taken * MS),
                "drained_ns": round(drained * MS),
                "others_ns": 0,
                "delayed_ns": 0,
            }
            for taken, drained in spans_ms
        ]
    )


def arm(
    intervals_ms: list[float], batch: int = 4, segment: int = 0, steps: int = 4, late_ms: float = 0.0
) -> pd.DataFrame:
    """Slices of so many steps, one a turn, with these mean intervals; a turn costs half a ms besides, and
    each of its steps leaves `late_ms` to its end."""
    intervals = np.array(intervals_ms)
    rows = {
        "round": segment,
        "turn": np.arange(len(intervals_ms)),
        "first_step": steps * np.arange(len(intervals_ms)),
        "steps": steps,
        "batch": batch,
        "tokens": steps * batch,
        "turn_ns": np.round((intervals + late_ms + 0.5 / steps) * MS).astype(int),
        "interval_ns": np.round(np.array(intervals_ms) * MS).astype(int),
        "device_ns": MS // 2,
        "parked_ns": MS,
        "parked_cpu_ns": 0,
        "others_ns": 0,
    }
    return pd.DataFrame(rows)


def test_a_slice_holds_the_steps_that_ended_in_its_turn_and_no_interval_across_turns():
    steps = steps_of([1, 3, 5, 21, 23, 26])
    found = slices.of_turns(steps, turns_of((0, 6), (20, 27)), lead=1)
    assert found["steps"].tolist() == [3, 3]
    assert found["first_step"].tolist() == [0, 3]
    assert found["interval_ns"].tolist() == [2 * MS, 5 * MS // 2]
    assert found["turn_ns"].tolist() == [2 * MS, round(7 / 3 * MS)]


def test_leading_steps_end_no_interval():
    steps = steps_of([10, 11, 13, 15])
    found = slices.of_turns(steps, turns_of((0, 16)), lead=2)
    assert found["interval_ns"].tolist() == [2 * MS]


def test_a_turn_without_a_step_is_no_slice_and_one_of_too_few_has_no_interval():
    found = slices.of_turns(steps_of([1]), turns_of((0, 2), (3, 4)), lead=1)
    assert found["turn"].tolist() == [0]
    assert not len(slices.decode_slices(found.assign(round=0)))


def test_a_turn_with_a_prefill_has_no_partner():
    steps = steps_of([1, 3, 5, 21, 23, 26], ["prefill", *["decode"] * 5])
    found = slices.of_turns(steps, turns_of((0, 6), (20, 27)), lead=1).assign(round=0)
    whole = slices.decode_slices(found)
    assert slices.pair(whole, whole)["turn"].tolist() == [1]


def test_slices_of_other_steps_are_no_pair():
    before, after = arm([2.0] * 10), arm([2.0] * 10)
    after.loc[3, "tokens"] -= 1  # a request ended a step earlier
    whole = [slices.decode_slices(each) for each in (before, after)]
    pairs = slices.pair(*whole)
    assert 3 not in pairs["turn"].tolist()
    assert slices.kept(pairs, *whole) == 0.9


def test_with_too_few_pairs_left_there_is_no_value():
    before, after = arm([2.0] * 10), arm([2.0] * 10)
    after.loc[:1, "tokens"] -= 1
    assert all(np.isnan(each[SLICED]) for each in slices.step_sliced(before, after))


@given(
    st.lists(st.floats(1.0, 5.0), min_size=5, max_size=40),
    st.floats(0.8, 1.25),
    st.floats(0.8, 1.25),
)
def test_the_change_is_that_of_the_pairs_whatever_the_machine_did_to_both(noise, change, other):
    before, *after = slices.step_sliced(
        arm(noise), arm([each * change for each in noise]), arm([each * other for each in noise])
    )
    assert after[0][SLICED] / before[SLICED] == pytest.approx(change, rel=1e-5)
    assert after[1][SLICED] / before[SLICED] == pytest.approx(other, rel=1e-5)


@given(st.integers(0, 9), st.floats(2.0, 1000.0))
def test_one_stall_in_ten_pairs_does_not_decide(where, stall):
    after = [2.0] * 10
    after[where] *= stall
    before, found = slices.step_sliced(arm([2.0] * 10), arm(after))
    assert found[SLICED] == before[SLICED] == pytest.approx(2.0)


def test_a_rare_stall_is_in_the_plain_mean_which_claims_about_stalls_are_judged_by():
    before, after = slices.step_sliced(arm([2.0] * 9 + [22.0]), arm([2.0] * 10))
    assert before[SLICED] == pytest.approx(after[SLICED])
    assert before[definitions.SLICED_MEAN] == pytest.approx(4.0)
    assert after[definitions.SLICED_MEAN] == pytest.approx(2.0)


def test_the_error_of_a_block_is_what_its_value_scatters_by_when_pairs_are_drawn_again():
    random = np.random.default_rng(3)

    def block() -> tuple[pd.DataFrame, pd.DataFrame]:
        return arm([2.0] * 200), arm(list(2.0 * np.exp(0.1 * random.standard_t(3, 200))))

    values, errors = [], []
    for _ in range(60):
        before, after = block()
        first, second = slices.step_sliced(before, after)
        values.append(np.log(second[SLICED] / first[SLICED]))
        pairs = slices.pair(*map(slices.decode_slices, (before, after)))
        errors.append(slices.error_of_pairs(pairs))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.25)


def test_cpu_used_while_parked_is_a_share_of_a_core():
    slices_of_arm = arm([2.0] * 4).assign(parked_cpu_ns=MS // 4)
    assert slices.busy_while_parked(slices_of_arm) == 0.25


def test_the_parts_of_the_step_add_up_and_are_where_the_change_is():
    """1.5 of 2 ms are exposed host time. One arm saves a third of that, the other half of the device's."""
    before = arm([2.0] * 10)
    host, device = arm([1.5] * 10), arm([1.75] * 10).assign(device_ns=MS // 4)
    _, on_host, on_device = slices.step_sliced(before, host, device)
    step, same_device, same_host = definitions.IN_TURNS
    assert (on_host[step], on_host[same_device], on_host[same_host]) == pytest.approx((1.5, 1.5, 2.0))
    assert (on_device[step], on_device[same_device], on_device[same_host]) == pytest.approx((1.75, 2.0, 1.75))


@given(st.lists(st.tuples(st.floats(1.0, 5.0), st.floats(1.0, 5.0)), min_size=3, max_size=30))
def test_the_shares_of_both_parts_add_up_to_the_change_whatever_the_pairs(intervals):
    first, second = zip(*intervals, strict=True)
    before, after = slices.step_sliced(arm(list(first)), arm(list(second)))
    changes = [after[name] / before[name] - 1 for name in definitions.IN_TURNS]
    assert changes[0] == pytest.approx(changes[1] + changes[2], abs=1e-9)


def test_what_a_step_leaves_to_the_end_of_its_turn_is_counted_as_its_own():
    slow = pd.concat([arm([2.0] * 10), arm([2.0] * 5, segment=1, steps=8)])
    honest = pd.concat([arm([1.8] * 10), arm([1.8] * 5, segment=1, steps=8)])
    late = pd.concat([arm([1.8] * 10, late_ms=0.2), arm([1.8] * 5, segment=1, steps=8, late_ms=0.2)])
    found = slices.step_sliced(slow, honest, late)
    assert [round(each[SLICED], 3) for each in found] == [2.0, 1.8, 1.8]
    assert [round(each[definitions.DRAINED], 3) for each in found] == [2.0, 1.8, 2.0]


def test_an_engine_that_knows_no_device_ends_its_steps_when_their_tokens_are_there():
    known = steps_of([1, 3, 5, 21, 23, 26])
    unknown = known.assign(device_end_ns=-1, device_ns=-1, **{"append.start": known["device_end_ns"]})
    turns = turns_of((0, 6), (20, 27))
    found = slices.of_turns(unknown, turns, lead=1)
    assert found["device_ns"].tolist() == [-1, -1]
    other = slices.of_turns(known, turns, lead=1)
    pd.testing.assert_frame_equal(found.drop(columns="device_ns"), other.drop(columns="device_ns"))


def test_a_step_without_a_device_has_no_parts():
    before, after = (arm([2.0 * more] * 10).assign(device_ns=-1) for more in (1.0, 1.1))
    first, second = slices.step_sliced(before, after)
    assert second[SLICED] / first[SLICED] == pytest.approx(1.1)
    assert all(np.isnan(second[name]) for name in definitions.IN_TURNS[1:])


def beside_others(intervals_ms: list[float], others: list[float]) -> pd.DataFrame:
    """Slices beside which other processes used these shares of a turn."""
    made = arm(intervals_ms)
    return made.assign(others_ns=np.round(np.array(others) * made["turn_ns"] * made["steps"]).astype(int))


def test_turns_in_which_others_used_the_cores_decide_nothing_where_enough_are_left():
    quiet, bursts = [2.0] * 12, [4.0] * 8
    calm = [0.0] * 12 + [0.5] * 8
    before = beside_others(quiet + bursts, calm)
    after = beside_others([1.9] * 12 + [1.0] * 8, [0.0] * 12 + [0.02] * 8)  # beside it there was less
    first, second = slices.step_sliced(before, after)
    assert first[SLICED] == pytest.approx(2.0)
    assert second[SLICED] == pytest.approx(1.9)
    assert second[definitions.SLICED_MEAN] / first[definitions.SLICED_MEAN] == pytest.approx(0.95)
    assert first[definitions.UNDISTURBED] == second[definitions.UNDISTURBED] == 0.6


def test_where_too_few_turns_are_undisturbed_all_are_shown_and_the_share_says_so():
    before, after = (beside_others([each] * 20, [0.5] * 18 + [0.0] * 2) for each in (2.0, 1.0))
    first, second = slices.step_sliced(before, after)
    assert second[SLICED] / first[SLICED] == pytest.approx(0.5)
    assert second[definitions.UNDISTURBED] == 0.1


def test_values_of_all_turns_are_not_believed_although_a_fifth_of_a_few_are_undisturbed():
    calm = [0.0] * 8 + [0.5] * 26
    sides = [beside_others([2.0] * 8 + [each] * 26, calm) for each in (2.0, 2.4)]
    first, second = slices.step_sliced(*sides)
    assert second[SLICED] / first[SLICED] > 1.1  # of all of them
    assert not slices.believed({"before": first, "after": second})
    ten = [beside_others([2.0] * 34, [0.0] * 10 + [0.5] * 24)] * 2
    assert slices.believed(dict(zip(("before", "after"), slices.step_sliced(*ten), strict=True)))
    few = [beside_others([2.0] * 4, [0.0] * 4)] * 2
    assert slices.believed(dict(zip(("before", "after"), slices.step_sliced(*few), strict=True)))


@given(st.lists(st.tuples(st.floats(1, 5), st.floats(0, 1), st.floats(0, 1)), min_size=12, max_size=40))
def test_which_turns_count_depends_on_others_alone(turns):
    noise, first, second = map(list, zip(*turns, strict=True))
    sides = beside_others(noise, first), beside_others([2 * each for each in noise], second)
    calm = slices.undisturbed(slices.pair(*sides))["turn"].tolist()
    changed = sides[0], sides[1].assign(interval_ns=7, parked_cpu_ns=9 * MS)
    assert slices.undisturbed(slices.pair(*changed))["turn"].tolist() == calm


def test_turns_of_a_machine_that_does_not_tell_and_of_older_runs_all_count():
    for unknown in (arm([2.0] * 12).assign(others_ns=-1), arm([2.0] * 12).drop(columns="others_ns")):
        assert len(slices.undisturbed(unknown)) == 12


def test_a_block_has_enough_turns_once_a_fifth_of_them_are_undisturbed() -> None:
    def turns(others: list[float]) -> pd.DataFrame:
        both = [beside_others([2.0] * len(others), others).assign(arm=name) for name in ("before", "after")]
        return pd.concat(both, ignore_index=True)

    assert slices.calm_enough(turns([0.0] * 10 + [0.5] * 40), "before", "after")
    assert not slices.calm_enough(turns([0.0] * 9 + [0.5] * 41), "before", "after")
    assert slices.calm_enough(turns([0.0] * 3), "before", "after")  # too few of either kind


def test_a_phase_is_told_by_turns_of_the_steps_that_have_it() -> None:
    """The first step of a turn fills the pipeline; the last of the second turn does not have the phase."""
    steps = steps_of([1, 3, 5, 21, 23, 26])
    took = [9, 10, 30, 9, 50, -1]
    steps["append.start"] = [round(end * MS) for end in [1, 3, 5, 21, 23, 26]]
    steps["append.end"] = steps["append.start"] + np.array(took) * 1_000
    steps.loc[5, ["append.start", "append.end"]] = -1
    found = slices.of_turns(steps, turns_of((0, 6), (20, 27)), lead=1)
    assert found["phase.append"].tolist() == [20_000, 50_000]
    assert "phase.output" not in found


def test_the_change_of_a_phase_is_that_of_its_pairs_and_absent_where_an_arm_has_none() -> None:
    before, after = arm([10, 11, 12, 10]), arm([10, 11, 12, 10])
    before["phase.append"], after["phase.append"] = [100e3, 400e3, 200e3, 100e3], [90e3, 360e3, 180e3, 90e3]
    before["phase.output"] = 5e3
    own, other = slices.step_sliced(before, after)
    assert other["decode_phase_append_us"] / own["decode_phase_append_us"] == pytest.approx(0.9)
    assert own["decode_phase_append_us"] == pytest.approx(200)
    assert own["decode_phase_output_us"] == 5
    assert np.isnan(other["decode_phase_output_us"])
    assert np.isnan(own["decode_phase_schedule_us"])
