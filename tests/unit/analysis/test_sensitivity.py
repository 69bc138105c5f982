"""Phases of a step, from turns with delays whose cost is known."""

import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import sensitivity
from overlap_bench.harness.report.sensitivity_tables import slack
from overlap_bench.harness.studies.sensitivity import parse_savings

US = 1000
SIZES = (100, 300, 1000, 2500, 5000)  # us
SLACK = {"schedule": 0.0, "append": 60.0, "launch": 900.0, "output": 99_000.0}
SLOPE = {"schedule": 1.0, "append": 2.0, "launch": 1.0, "output": 1.0}
OWN = {"schedule": 250.0, "append": 80.0, "launch": 60.0, "output": 400.0}


def trial(seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    rows = [
        {
            "phase": phase,
            "size_ns": size * US,
            "delay_ns": size * US + 200,
            "cost_ns": SLOPE[phase] * max(0.0, size - slack) * US + random.normal(0, 40 * US),
        }
        for phase, slack in SLACK.items()
        for size in SIZES
        for _ in range(10)
    ]
    quiet = [{"phase": "", **{f"us.{name}": us for name, us in OWN.items()}} for _ in range(40)]
    return pd.DataFrame([*rows, *quiet])


def test_phases_come_in_the_order_of_what_they_could_give_and_hidden_ones_give_nothing() -> None:
    found, left_out = sensitivity.phases([trial(seed) for seed in range(6)], [*SLACK, "metadata"], 10_000)
    assert left_out.keys() == {"metadata"}
    schedule, *others = found
    assert schedule.phase == "schedule"
    assert schedule.slope == pytest.approx(1, abs=0.05)
    assert schedule.slack_low < 20
    assert schedule.gain_most == pytest.approx(250, rel=0.05)
    by_name = {each.phase: each for each in others}
    assert by_name["append"].gain_most == pytest.approx(160, rel=0.05)  # no delay lay within its slack
    assert slack(by_name["append"]) == "under 100"
    assert by_name["launch"].slack_us == pytest.approx(900, abs=100)
    assert by_name["output"].slack_us is None
    assert by_name["output"].slack_low >= 5000
    assert by_name["launch"].gain_most == by_name["output"].gain_most == 0


def test_what_had_only_long_delays_is_hidden_however_short_its_slack_may_be() -> None:
    rows = trial(0)
    rows = rows[(rows["phase"] != "launch") | (rows["size_ns"] > 400 * US)]
    rows["cost_ns"] = (rows["delay_ns"] - 750 * US).clip(lower=0)
    other = rows.assign(cost_ns=(rows["delay_ns"] - 850 * US).clip(lower=0))
    (launch,), _ = sensitivity.phases([rows, other, rows], ["launch"], 10_000)
    assert launch.slack_low < launch.points[0][0]
    assert launch.gain_most == 0


def test_what_was_hardly_delayed_is_left_out() -> None:
    """A phase with too few sizes, or whose code did not come to where it is delayed."""
    rows = trial(0)
    never = rows.assign(delay_ns=rows["delay_ns"].where(rows["phase"] != "launch", 0))
    few = rows[(rows["phase"] != "append") | (rows["size_ns"] > 2000 * US)]
    for each, name in ((never, "launch"), (few, "append")):
        found, left_out = sensitivity.phases([each, rows], [*SLACK], 10_000)
        assert {*left_out} == {name}
        assert len(found) == len(SLACK) - 1


def segment(delays: list[tuple[str, int]], step_us: list[float]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Records of turns of four steps, each with a `schedule` of 20 us; of a turn, its steps' time."""
    rows, turns, now = [], [], 1_000
    for turn, took in enumerate(step_us):
        taken = now
        for _ in range(4):
            began, now = now, now + round(took * US)
            rows.append(dict.fromkeys(api.STEP_COLUMNS, -1) | {"step": len(rows), "device_end_ns": now})
            rows[-1] |= {"schedule.start": began, "schedule.end": began + 20 * US}
        delayed = 4 * delays[turn % len(delays)][1]
        turns.append({"taken_ns": taken, "drained_ns": now + 1, "delayed_ns": delayed, "parked_ns": 0})
        turns[-1] |= {"parked_cpu_ns": 0, "others_ns": 0}
        now += 500 * US
    always = {"kind": "decode", "batch": 4, "tokens": 4, "device_ns": 900 * US}
    return pd.DataFrame(rows).assign(**always), pd.DataFrame(turns)


def spans(phase: str, *each: tuple[float, float]) -> pd.DataFrame:
    columns = ["phase", "start_ns", "end_ns"]
    return pd.DataFrame([(phase, int(start), int(end)) for start, end in each], columns=columns)


def test_a_turns_cost_is_what_its_steps_take_longer_than_those_beside_it() -> None:
    delays = [("", 0), ("schedule", 300 * US), ("", 0), ("schedule", 500 * US)]
    steps, turns = segment(delays, [1000, 1310, 1020, 1520, 1000])
    found = sensitivity.of_segment(steps, turns, spans(""), 1, delays, ["schedule", "append", "tokenize"])
    found = sensitivity.with_costs(found)
    assert list(found["phase"]) == ["", "schedule", "", "schedule", ""]
    assert list(found["size_ns"]) == [0, 300 * US, 0, 500 * US, 0]
    assert list(found["delay_ns"]) == [0, 300 * US, 0, 500 * US, 0]
    assert list(found["cost_ns"].dropna()) == [300 * US, 510 * US]
    assert set(found["us.schedule"]) == {20}
    assert found["us.append"].isna().all()  # a step's, and none had it
    assert found["us.tokenize"].isna().all()  # another's, and none did it


def test_what_another_process_does_costs_nothing_until_it_takes_longer_than_a_step() -> None:
    delays = [("", 0), ("output-process", 600 * US), ("", 0), ("output-process", 1300 * US)]
    steps, turns = segment(delays, [1000] * 4)
    beside = spans(
        "output-process",
        *(
            (taken + 10 + number, taken + 10 + number + (100 * US + ns))
            for taken, (_, ns) in zip(turns["taken_ns"], delays, strict=True)
            for number in range(4)
        ),
    )
    found = sensitivity.of_segment(steps, turns, beside, 1, delays, ["output-process"])
    found = sensitivity.with_costs(found)
    assert list(found["cost_ns"].dropna()) == [0, 400 * US]
    assert set(found.loc[found["phase"] == "", "us.output-process"]) == {100}


def test_turns_that_something_else_disturbed_count_where_there_are_no_others() -> None:
    delays = [("", 0), ("schedule", 300 * US)]
    steps, turns = segment(delays, [1000, 1300] * 20)
    turns.loc[[4, 5], "others_ns"] = 2000 * US
    found = sensitivity.of_segment(steps, turns, spans(""), 1, delays, ["schedule"])
    assert set(found["turn"]) - set(sensitivity.with_costs(found)["turn"]) == {4, 5}
    costs = sensitivity.with_costs(found).set_index("turn")["cost_ns"]
    assert set(costs.dropna()) == {300 * US}  # turn 3's by turn 2 alone
    turns["others_ns"] = 2000 * US
    found = sensitivity.of_segment(steps, turns, spans(""), 1, delays, ["schedule"])
    assert len(sensitivity.with_costs(found)) == len(found)


def test_texts_that_come_before_the_turns_are_shared_by_all_steps() -> None:
    steps, turns = segment([("", 0)], [1000] * 4)
    beside = spans("tokenize", (100, 100 + 80 * US), (300, 300 + 80 * US))
    found = sensitivity.of_segment(steps, turns, beside, 1, [("", 0)], ["tokenize"])
    assert set(found["us.tokenize"]) == {160 / 16}


def test_a_claim_of_some_us_is_multiplied_by_the_slope() -> None:
    found, _ = sensitivity.phases([trial(seed) for seed in range(6)], [*SLACK], 10_000)
    savings = {each.phase: sensitivity.saving(each, 13) for each in found}
    assert savings["schedule"].gain_us == pytest.approx(13, rel=0.05)
    assert savings["schedule"].gain_low < savings["schedule"].gain_us < savings["schedule"].gain_high
    assert savings["output"].gain_us == 0
    schedule = next(each for each in found if each.phase == "schedule")
    assert sensitivity.saving(schedule, 1e6).us == schedule.us  # no more than all of it


def test_savings_are_times_of_phases() -> None:
    assert parse_savings(["schedule=13us", "append=0.5ms"]) == {"schedule": 13.0, "append": 500.0}
    for wrong in ("schedule", "schedule=13", "schedule=us", "schedule=1.2.3us", "schedule=.us"):
        with pytest.raises(api.BadSetting, match="--saves needs PHASE=TIME"):
            parse_savings([wrong])
    with pytest.raises(api.BadSetting, match="--saves names schedule twice"):
        parse_savings(["schedule=13us", "schedule=20us"])
