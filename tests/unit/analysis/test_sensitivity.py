"""Phases of a step, from turns with delays whose cost is known."""

from __future__ import annotations

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
OWN = {"schedule": 250.0, "append": 80.0, "launch": 60.0, "output": 400.0}


def trial(seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    rows = [
        {
            "phase": phase,
            "size_ns": size * US,
            "delay_ns": size * US + 200,
            "cost_ns": max(0.0, size - slack) * US + random.normal(0, 40 * US),
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
    assert by_name["append"].gain_most == pytest.approx(80, rel=0.05)  # no delay lay within its slack
    assert slack(by_name["append"]) == "under 100"
    assert by_name["launch"].slack_us == pytest.approx(900, abs=100)
    assert by_name["output"].slack_us is None
    assert by_name["output"].slack_low >= 5000
    assert by_name["launch"].gain_most == by_name["output"].gain_most == 0


def test_a_claim_of_some_us_is_multiplied_by_the_slope() -> None:
    found, _ = sensitivity.phases([trial(seed) for seed in range(6)], [*SLACK], 10_000)
    savings = {each.phase: sensitivity.saving(each, 13) for each in found}
    assert savings["schedule"].gain_us == pytest.approx(13, rel=0.05)
    assert savings["schedule"].gain_low < savings["schedule"].gain_us < savings["schedule"].gain_high
    assert savings["output"].gain_us == 0


def test_savings_are_times_of_phases() -> None:
    assert parse_savings(["schedule=13us", "append=0.5ms"]) == {"schedule": 13.0, "append": 500.0}
    for wrong in ("schedule", "schedule=13", "schedule=us"):
        with pytest.raises(api.BadSetting, match="--saves needs PHASE=TIME"):
            parse_savings([wrong])
