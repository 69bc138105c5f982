"""The ranks of one model, each with a device: what the records of a round say of each."""

import numpy as np
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.metrics import ranks
from overlap_bench.harness.run import records
from tests.unit.metrics.test_metrics import MS
from tests.unit.metrics.test_step_metrics import DECODE, frames, record

STEPS = [(number, DECODE, 2, 0, 1) for number in range(3)]
# The second rank's device begins 1 ms late, on time, and 2 ms early.
FIRST = [(0, 0, 10, 20), (0, 1, 24, 30), (0, 2, 32, 40)]
SECOND = [(0, 0, 11, 20), (0, 1, 24, 30), (0, 2, 30, 40)]


def of_two(
    first: list[tuple[int, int, int, int]], second: list[tuple[int, int, int, int]]
) -> api.RoundRecord:
    whole, other = record(STEPS, first), record(STEPS, second).device_work
    return api.RoundRecord(steps=whole.steps, device_work=whole.device_work, other_ranks=[other])


def test_each_rank_has_its_own_busy_share_exposed_host_time_and_waiting() -> None:
    first, second = ranks.times(*frames(of_two(FIRST, SECOND)))
    assert first["exposed_host_us"] == pytest.approx(3000)  # 4 ms and 2 ms without a program
    assert second["exposed_host_us"] == pytest.approx(2000)
    assert first["device_busy"] == pytest.approx(24 / 30)
    assert second["device_busy"] == pytest.approx(25 / 29)
    assert first["waiting_us"] == pytest.approx(1000 / 3)
    assert second["waiting_us"] == pytest.approx(2000 / 3)


def test_a_step_of_many_programs_began_with_its_first() -> None:
    split = [(0, 0, 10, 13), (0, 0, 14, 16), (0, 0, 17, 20)]
    first, second = ranks.times(*frames(of_two(split, SECOND[:1])))
    assert (first["waiting_us"], second["waiting_us"]) == (pytest.approx(1000), 0)


def test_a_rank_that_did_not_run_a_step_has_no_times_of_it_and_is_waited_for_by_nobody() -> None:
    steps, work = frames(of_two(FIRST, SECOND[:2]))
    assert steps["device_end_ns.1"].tolist() == [20 * MS, 30 * MS, -1]
    _, second = ranks.times(steps, work)
    assert second["exposed_host_us"] == pytest.approx(4000)
    assert second["waiting_us"] == 0


def test_a_table_in_which_another_arm_has_fewer_ranks_is_read_as_each_arm_was() -> None:
    one, two = frames(record(STEPS, FIRST))[0], frames(of_two(FIRST, SECOND))[0]
    table = pd.concat([one.assign(arm="before"), two.assign(arm="after")])
    before, after = (table[table["arm"] == arm] for arm in ("before", "after"))
    assert (ranks.count(before), ranks.count(after)) == (1, 2)
    assert ranks.of_rank(after, 1)["device_start_ns"].tolist() == [11 * MS, 24 * MS, 30 * MS]


def test_records_of_another_rank_that_can_not_be_are_refused() -> None:
    wrong = of_two(FIRST, [(0, 0, 20, 11)])
    assert "a piece of device work ends before it starts" in records.broken(wrong, 0, 100 * MS)


def test_an_engine_without_device_records_has_one_rank_and_no_times_of_it() -> None:
    steps, work = frames(record(STEPS, []))
    (only,) = ranks.times(steps, work)
    assert np.isnan([only[name] for name in ranks.TIMES]).all()
