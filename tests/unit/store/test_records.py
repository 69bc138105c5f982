"""What can't be in the records of a round is told, and nothing that can be."""

import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.run.records import broken

S = 1_000_000_000
BEGAN, ENDED = 100 * S, 110 * S
STEP = {"step": 1, "kind": 1, "batch": 1, "launch.start": 101 * S, "launch.end": 102 * S}


def table(*steps: dict[str, int], columns: tuple[str, ...] = api.STEP_COLUMNS) -> api.StepTable:
    rows = [[step.get(name, -1) for name in columns] for step in steps]
    return api.StepTable(list(columns), len(rows), np.array(rows, dtype=np.int64).tobytes())


def of_steps(steps: api.StepTable) -> str:
    return broken(api.RoundRecord(steps=steps), BEGAN, ENDED)


def of_work(*row: int) -> str:
    data = np.array(row, dtype=np.int64).tobytes()
    return broken(api.RoundRecord(device_work=api.DeviceWork(1, data)), BEGAN, ENDED)


def test_what_can_be_is_taken() -> None:
    assert broken(api.RoundRecord(), BEGAN, ENDED) == ""
    assert of_steps(table(STEP, STEP | {"step": 2})) == ""
    assert of_steps(table(STEP, columns=api.STEP_COLUMNS[::-1])) == ""
    assert of_work(0, 1, 101 * S, 102 * S) == ""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": 3}, "a step's kind is not an index into STEP_KINDS"),
        ({"launch.end": 101 * S - 1}, "launch of a step ends before it starts"),
        ({"launch.end": -1}, "launch of a step ends before it starts"),
        (
            {"launch.start": 1_700_000_000 * S, "launch.end": 1_700_000_001 * S},
            "launch of a step lies outside of the round: its stamps are not perf_counter_ns",
        ),
    ],
)
def test_a_step_that_can_not_be_is_told(wrong: dict[str, int], message: str) -> None:
    assert of_steps(table(STEP | wrong)) == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((3, 1, 101 * S, 102 * S), "a kind of device work is not one of 0 to 2"),
        ((0, 1, 102 * S, 101 * S), "a piece of device work ends before it starts"),
        (
            (0, 1, 90 * S, 102 * S),
            "a piece of device work lies outside of the round: its stamps are not perf_counter_ns",
        ),
        ((0, 1, 101 * S), "its device work is 24 bytes, which is not 1 rows"),
    ],
)
def test_device_work_that_can_not_be_is_told(row: tuple[int, ...], message: str) -> None:
    assert of_work(*row) == message


def test_a_table_that_can_not_be_is_told() -> None:
    assert of_steps(table(STEP, STEP)) == "two steps have the same number"
    short = table(STEP)
    assert of_steps(api.StepTable(short.columns, 2, short.data)) == (
        "its step records are 200 bytes, which is not 2 rows"
    )
    assert of_steps(table(STEP, columns=api.STEP_COLUMNS[1:])) == (
        "the columns of its steps are not those of StepTable: step"
    )
    assert of_steps(table(STEP, columns=(*api.STEP_COLUMNS, "step"))) == (
        "the columns of its steps are not those of StepTable: one is there twice"
    )
