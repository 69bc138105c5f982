"""Metrics of steps against cases worked out by hand, and properties that must hold."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.metrics import block, definitions
from overlap_bench.harness.metrics.steps import (
    decode_intervals,
    device_busy,
    round_step_ms_mean,
    steps_matched,
)
from overlap_bench.harness.run import records
from tests.unit.metrics.test_metrics import MS, NOTHING, request, rounds

PREFILL, DECODE = 0, 1
Row = tuple[int, int, int, int, int]  # step, kind, batch, dropped, ms of host work


def record(rows: Sequence[Row], work: Sequence[tuple[int, int, int, int]]) -> api.RoundRecord:
    """Steps whose schedule phase takes the given ms, and device work (kind, step, start, end) in ms."""
    table = np.full((len(rows), len(api.STEP_COLUMNS)), -1, dtype=np.int64)
    column = {name: index for index, name in enumerate(api.STEP_COLUMNS)}
    for row, (step, kind, batch, dropped, host) in zip(table, rows, strict=True):
        row[[column[name] for name in ("step", "kind", "batch", "tokens", "dropped", "preempted")]] = (
            *(step, kind, batch, batch, dropped, 0),
        )
        row[[column["schedule.start"], column["schedule.end"]]] = (1000 * MS, (1000 + host) * MS)
    matrix = np.array(work, dtype=np.int64).reshape(-1, 4)
    matrix[:, 2:] *= MS
    return api.RoundRecord(
        steps=api.StepTable(list(api.STEP_COLUMNS), len(rows), table.tobytes()),
        device_work=api.DeviceWork(len(matrix), matrix.tobytes()),
    )


# A prefill, two decode steps back to back, a prefill, two decode steps with a hole of 2 ms between them;
# the last is two programs. Then a step that nobody wanted.
EXAMPLE = record(
    [
        (0, PREFILL, 2, 0, 9),
        (1, DECODE, 2, 0, 1),
        (2, DECODE, 2, 0, 1),
        (3, PREFILL, 1, 0, 9),
        (4, DECODE, 3, 0, 3),
        (5, DECODE, 3, 1, 3),
        (6, DECODE, 2, 2, 9),
    ],
    [
        (0, 0, 0, 20),
        (0, 1, 20, 30),
        (0, 2, 30, 40),
        (1, 3, 35, 39),  # a copy beside a program
        (0, 3, 50, 60),
        (0, 4, 60, 74),
        (0, 5, 76, 80),
        (0, 5, 81, 90),
        (2, 5, 90, 93),
        (0, 6, 95, 99),
    ],
)


def frames(source: api.RoundRecord, number: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    steps, device = records.steps_frame(source), records.device_frame(source)
    return steps.assign(round=number), device.assign(round=number)


def test_step_metrics_by_hand() -> None:
    steps, device = frames(EXAMPLE)
    values = block.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    # Pairs of decode steps: 1-2 (10 ms, all execution) and 4-5 (16 ms, 13 of them execution).
    assert values["step_ms"] == pytest.approx(13)
    # Every decode step, behind whatever: 1, 2, 4 and 5 took 10, 10, 14 and 16 ms.
    assert round_step_ms_mean(steps) == pytest.approx(12.5)
    assert values["exposed_host_us"] == pytest.approx(1500)
    # From 20 (step 1 starts) to 90 (step 5 ends), idle 40-50, 74-76, 80-81.
    assert values["device_busy"] == pytest.approx((70 - 13) / 70)
    assert values["phase_schedule_us"] == pytest.approx(2000)  # decode steps only, dropped ones are none
    assert values["phase_wait_copy_done_us"] == 0


def test_rounds_do_not_run_into_each_other() -> None:
    first, second = (frames(record([(0, DECODE, 1, 0, 1)], [(0, 0, at, at + 1)]), at) for at in (0, 50))
    steps = pd.concat([first[0], second[0].assign(step=1)])
    assert decode_intervals(steps).empty
    assert device_busy(steps, pd.concat([first[1], second[1]])) == pytest.approx(1)


def test_no_interval_spans_a_step_that_was_not_recorded() -> None:
    stamps = [(0, 0, 0, 1), (0, 1, 1, 3), (0, 3, 6, 8)]
    steps, _ = frames(record([(number, DECODE, 1, 0, 1) for number in (0, 1, 3)], stamps))
    assert decode_intervals(steps)["interval_ns"].tolist() == [2 * MS]


def test_steps_without_a_recorder_or_a_device() -> None:
    for steps in (NOTHING, records.steps_frame(api.RoundRecord()).assign(round=0)):
        values = block.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), NOTHING)
        assert math.isnan(values["step_ms"])
        assert math.isnan(values["phase_launch_us"])
    steps, device = frames(record([(0, DECODE, 1, 0, 1), (1, DECODE, 1, 0, 1)], []))
    values = block.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    assert math.isnan(values["step_ms"])
    assert math.isnan(values["device_busy"])
    assert values["phase_schedule_us"] == pytest.approx(1000)


def test_every_metric_has_a_description_and_the_other_way_round() -> None:
    steps, device = frames(EXAMPLE)
    values = block.of_boot(pd.DataFrame([request()]), steps, rounds((0, 100)), device)
    assert values.keys() | set(definitions.BETWEEN_ARMS) == definitions.METRICS.keys()
    assert all(name == metric.name for name, metric in definitions.METRICS.items())


def gapped(*steps: tuple[int, int, int]) -> pd.DataFrame:
    """Decode steps of (batch, ms of host time exposed in front of it, ms on the device), after one that is in
    no interval."""
    rows: list[Row] = [(0, DECODE, 1, 0, 1)]
    work = [(0, 0, 0, 1)]
    for number, (batch, exposed, on_device) in enumerate(steps, start=1):
        rows.append((number, DECODE, batch, 0, 1))
        start = work[-1][3] + exposed
        work.append((0, number, start, start + on_device))
    return frames(record(rows, work))[0]


def chain(*batches_and_ms: tuple[int, int]) -> pd.DataFrame:
    """Decode steps of the given batch sizes and lengths, back to back."""
    return gapped(*((batch, 0, length) for batch, length in batches_and_ms))


def matched(*steps: pd.DataFrame) -> list[float]:
    return [each["round_step_ms"] for each in steps_matched(*steps)]


def test_matching_undoes_a_change_of_mix() -> None:
    before = chain((8, 20), (8, 20), (8, 20), (4, 10), (2, 5))
    after = chain((4, 10), (4, 10), (4, 10), (8, 20), (16, 40))  # no faster at any batch size
    # Batch 2 and 16 are left out; batch 8 has weight 3, batch 4 weight 1.
    assert matched(before, after) == pytest.approx([17.5, 17.5])
    faster = chain((4, 9), (4, 9), (8, 16))
    assert matched(before, faster) == pytest.approx([17.5, (3 * 16 + 9) / 4])
    assert all(math.isnan(value) for value in matched(before, chain((64, 80))))


def test_a_step_with_one_part_held_by_hand() -> None:
    before, after = steps_matched(gapped((4, 5, 15), (4, 7, 15)), gapped((4, 3, 14), (4, 3, 12)))
    assert before == pytest.approx(dict.fromkeys(definitions.MATCHED, 21.0))  # 6 exposed, 15 on the device
    assert after == pytest.approx(
        {"round_step_ms": 3 + 13, "round_step_ms_same_device": 3 + 15, "round_step_ms_same_host": 6 + 13}
    )


some_gapped = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=12
)


@given(st.lists(some_gapped, min_size=2, max_size=3))
def test_the_parts_of_a_change_add_up_to_it(arms: list[list[tuple[int, int, int]]]) -> None:
    first, *others = steps_matched(*(gapped(*steps) for steps in arms))
    whole, host, device = definitions.MATCHED
    for each in others:
        changes = {name: each[name] - first[name] for name in definitions.MATCHED}
        assert changes[host] + changes[device] == pytest.approx(changes[whole], abs=1e-9, nan_ok=True)
        assert list(first.values()) == pytest.approx([first[whole]] * 3, nan_ok=True)


@pytest.mark.parametrize(
    ("programs", "ran"),
    [
        ([(10, 14), (16, 20)], 8),  # with a hole between them
        ([(10, 14), (12, 18)], 8),  # side by side
        ([(10, 20), (12, 14), (18, 21)], 11),  # one within another
        ([(12, 14), (10, 20)], 10),  # recorded in another order
    ],
)
def test_the_device_time_of_a_step_counts_programs_that_run_side_by_side_once(
    programs: list[tuple[int, int]], ran: int
) -> None:
    work = [(0, 7, 2, 12), *((0, 8, start, end) for start, end in programs), (0, 9, 30, 31)]
    steps = records.steps_frame(record([(step, DECODE, 1, 0, 1) for step in (7, 8, 9)], work))
    assert steps["device_ns"].tolist() == [10 * MS, ran * MS, MS]  # each step by itself


def test_steps_frame_keeps_stamps_exact_and_joins_the_device() -> None:
    big = 2**62 // MS  # a stamp that a float cannot hold
    steps = records.steps_frame(record([(7, DECODE, 1, 0, 1), (8, DECODE, 1, 0, 1)], [(0, 8, big, big + 3)]))
    assert steps["device_start_ns"].tolist() == [-1, big * MS]
    assert steps["device_end_ns"].tolist() == [-1, (big + 3) * MS]
    assert steps["device_ns"].tolist() == [-1, 3 * MS]
    frame = records.steps_frame(EXAMPLE)
    assert frame["kind"].tolist() == ["prefill", "decode", "decode", "prefill", "decode", "decode", "dropped"]
    assert frame.drop(columns="kind").dtypes.eq("int64").all()
    assert frame["launch.start"].eq(-1).all()
    empty = records.steps_frame(api.RoundRecord())
    assert empty.columns.tolist() == frame.columns.tolist()
    assert empty.empty


def test_a_step_that_gives_each_request_several_tokens_counts_as_that_many() -> None:
    """Two rows: eight tokens each in step 1 and 2, then one row of step 2 ends after four."""
    steps, device = frames(
        record(
            [(0, PREFILL, 2, 0, 1), (1, DECODE, 2, 0, 8), (2, DECODE, 2, 0, 8), (3, DECODE, 2, 1, 8)],
            [(0, 0, 0, 10), (0, 1, 20, 100), (0, 2, 110, 200), (0, 3, 210, 290)],
        )
    )
    alone = decode_intervals(steps)
    assert list(alone["interval_ns"]) == [100 * MS, 90 * MS], "without a count, one token each"
    counted = steps.assign(given=[2, 16, 12, 8])
    found = decode_intervals(counted)
    assert list(found["interval_ns"]) == [100 * MS / 6, 90 * MS / 8]
    assert list(found["device_ns"]) == [90 * MS / 6, 80 * MS / 8]
    assert round_step_ms_mean(counted) == pytest.approx((90 + 100 + 90) / (8 + 6 + 8))
    values = block.of_boot(pd.DataFrame([request()]), counted, rounds((0, 300)), device)
    assert values["phase_schedule_us"] == pytest.approx(24_000 / (8 + 6 + 8))
