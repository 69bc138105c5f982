"""Where a decode interval goes: cases worked out by hand, and what holds for any stamps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines.api import STEP_COLUMNS
from overlap_bench.harness.metrics.attribution import PARTS, attribute, matched_means, of_each_step, paint
from overlap_bench.harness.metrics.slices import BESIDE, PART_COLUMNS, of_turns
from overlap_bench.harness.metrics.steps import decode_intervals, exposed_host_us, matched_share

Phases = Mapping[str, tuple[int, int]]


def one_step(
    step: int, device: tuple[int, int], phases: Phases, kind: str = "decode", batch: int = 1
) -> dict[str, object]:
    """A row of steps_frame; phases that are not given did not happen. Times are us."""
    row: dict[str, object] = dict.fromkeys(STEP_COLUMNS, -1)
    row |= {"step": step, "kind": kind, "batch": batch, "dropped": 0, "preempted": 0, "round": 0}
    row |= {"device_start_ns": device[0] * 1000, "device_end_ns": device[1] * 1000}
    row["device_ns"] = (device[1] - device[0]) * 1000
    for phase, (start, end) in phases.items():
        row |= {f"{phase}.start": start * 1000, f"{phase}.end": end * 1000}
    return row


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def programs(*spans: tuple[int, int, int]) -> pd.DataFrame:
    """device_frame of programs (step, start, end), us."""
    return pd.DataFrame(
        [
            {"kind": "program", "step": step, "start_ns": start * 1000, "end_ns": end * 1000, "round": 0}
            for step, start, end in spans
        ]
    )


def parts_us(
    steps: pd.DataFrame, work: pd.DataFrame | None = None, forward_thread: bool = False
) -> list[dict[str, float]]:
    """The parts of each interval that are not zero, us."""
    found = attribute(steps, pd.DataFrame() if work is None else work, forward_thread)
    assert (found[list(PARTS)].sum(axis=1) == found["interval_ns"]).all()
    return [{part: row[part] / 1000 for part in PARTS if row[part]} for _, row in found.iterrows()]


# By what it shows: steps, what is known besides, and the parts of the last step's interval.
BY_HAND: dict[str, tuple[list[dict[str, object]], dict[str, Any], dict[str, int]]] = {
    # The device ends step 0 at 100; all the host does until it starts step 1 at 200 is exposed.
    "a serial step shows every host phase": (
        [
            one_step(0, (50, 100), {"wait.copy_done": (50, 120), "append": (122, 130), "output": (130, 150)}),
            one_step(
                1,
                (200, 260),
                {
                    "recv": (150, 155),
                    "schedule": (155, 165),
                    "metadata": (165, 170),
                    "h2d": (172, 182),
                    "launch": (182, 190),
                    "wait.copy_done": (191, 280),
                },
            ),
        ],
        {},
        {
            "device": 60,
            "launch latency": 10,
            "h2d": 10,
            "launch": 8,
            "completion latency": 20,
            "append": 8,
            "output": 20,
            "recv": 5,
            "schedule": 10,
            "metadata": 5,
            "unattributed": 4,
        },
    ),
    # Deferred: step 0's output runs from 190 on, while the device starts and executes step 1.
    "output in the shadow of the device is not exposed": (
        [
            one_step(0, (50, 100), {"wait.copy_done": (50, 120), "append": (120, 130)}),
            one_step(1, (200, 260), {"schedule": (130, 180), "launch": (180, 190), "output": (190, 230)}),
        ],
        {},
        {
            "device": 60,
            "launch latency": 10,
            "launch": 10,
            "completion latency": 20,
            "append": 10,
            "schedule": 50,
        },
    ),
    "an overlapped step that was queued shows the turnaround alone": (
        [
            one_step(0, (50, 100), {"launch": (10, 20), "wait.copy_done": (90, 115), "append": (115, 125)}),
            one_step(1, (109, 160), {"schedule": (60, 70), "launch": (80, 90)}),
        ],
        {},
        {"device": 51, "turnaround": 9},
    ),
    # Step 2 is launched only at 150, long after the device ended step 1 at 100: first the ids of step 0 are
    # processed.
    "a host-bound overlapped step shows what the host was at": (
        [
            one_step(0, (10, 40), {"wait.copy_done": (80, 105), "append": (105, 110), "output": (110, 125)}),
            one_step(1, (45, 100), {"launch": (30, 40)}),
            one_step(2, (153, 200), {"schedule": (125, 140), "h2d": (140, 145), "launch": (145, 150)}),
        ],
        {},
        {
            "device": 47,
            "launch latency": 3,
            "h2d": 5,
            "launch": 5,
            "completion latency": 5,
            "append": 5,
            "output": 15,
            "schedule": 15,
        },
    ),
    # Ready at 110 and launched from 140 on, while the scheduler's thread processes and then waits.
    "a forward thread that does not get to launch is a hand-over": (
        [
            one_step(0, (50, 100), {"launch": (10, 20), "append": (112, 125), "wait.copy_done": (110, 112)}),
            one_step(
                1,
                (155, 200),
                {
                    "metadata": (95, 110),
                    "wait.launch_done": (125, 152),
                    "h2d": (140, 145),
                    "launch": (145, 150),
                },
            ),
        ],
        {"forward_thread": True},
        {"device": 45, "launch latency": 5, "h2d": 5, "launch": 5, "hand-over": 30, "metadata": 10},
    ),
    "holes of an eager step belong to the launch that is under way": (
        [one_step(0, (50, 100), {"launch": (10, 20)}), one_step(1, (120, 200), {"launch": (110, 180)})],
        {"work": programs((0, 50, 100), (1, 120, 130), (1, 150, 160), (1, 185, 200))},
        {"device": 35, "launch latency": 5, "launch": 50, "unattributed": 10},
    ),
    "an engine without phases has nothing attributed but the device": (
        [one_step(0, (50, 100), {}), one_step(1, (140, 200), {})],
        {},
        {"device": 60, "unattributed": 40},
    ),
    "a step behind a prefill has no interval": (
        [one_step(0, (50, 100), {}, kind="prefill"), one_step(1, (140, 200), {})],
        {},
        {},
    ),
}


@pytest.mark.parametrize(("steps", "known", "parts"), BY_HAND.values(), ids=BY_HAND)
def test_parts_by_hand(steps: list[dict[str, object]], known: dict[str, Any], parts: dict[str, int]) -> None:
    assert parts_us(frame(*steps), **known)[-1:] == ([parts] if parts else [])


def test_a_device_that_has_begun_before_another_ranks_waits_for_the_slowest_one() -> None:
    """A planted delay, a program in front of the step's own, is not waiting, nor is time after the end."""
    later = {"device_start_ns.1": 215_000, "device_start_ns.2": 230_000}
    steps = frame(
        one_step(0, (50, 100), {}) | {"device_start_ns.1": 40_000, "device_start_ns.2": 50_000},
        one_step(1, (100, 260), {}) | later,
        one_step(2, (260, 300), {}) | {"device_start_ns.1": 260_000, "device_start_ns.2": 400_000},
    )
    work = programs((0, 50, 100), (1, 100, 210), (1, 210, 260), (2, 260, 300))
    assert parts_us(steps, work) == [{"slowest rank": 20, "device": 140}, {"slowest rank": 40}]
    assert parts_us(steps.drop(columns=list(later)), work) == [{"device": 160}, {"device": 40}]


def test_a_slice_of_steps_has_their_mean_parts_and_they_add_up_to_its_interval() -> None:
    """A turn of three steps behind another one: its first step, which waited for its turn, is left out."""
    ends = (100, 200, 1000, 1100, 1240)
    steps = frame(
        *(
            one_step(step, (end - 50, end), {"h2d": (end - 80, end - 60), "launch": (end - 60, end - 50)})
            for step, end in enumerate(ends)
        )
    ).assign(tokens=1)
    turns = pd.DataFrame(
        {"taken_ns": [0, 900_000], "drained_ns": [250_000, 1_300_000]} | dict.fromkeys(BESIDE, 0)
    )
    parts = of_each_step(steps, pd.DataFrame(), forward_thread=False)
    found = of_turns(steps, turns, lead=1, parts=parts)
    assert found["interval_ns"].tolist() == [100_000, 120_000]
    assert (found[list(PART_COLUMNS)].sum(axis=1) == found["interval_ns"]).all()
    assert found["part.device"].tolist() == [50_000, 50_000]
    assert found["part.h2d"].tolist() == [20_000, 20_000]
    assert found["part.unattributed"].tolist() == [20_000, 40_000]
    unknown = steps.assign(device_end_ns=-1, **{"append.start": steps["device_end_ns"]})
    none = of_each_step(unknown, pd.DataFrame(), forward_thread=False)
    assert not set(PART_COLUMNS) & set(of_turns(unknown, turns, lead=1, parts=none))


def test_a_step_of_several_tokens_is_attributed_whole_and_shared_out_among_them() -> None:
    """Eight tokens in 800 us, half of them on the device: 50 of each token's 100 us, not all of it."""
    phases = {"schedule": (1000, 1300), "launch": (1300, 1400)}
    rows = (one_step(0, (600, 1000), {}), one_step(1, (1400, 1800), phases))
    found = attribute(frame(*rows).assign(given=8), pd.DataFrame(), forward_thread=False)
    parts = {part: found[part].item() for part in PARTS if found[part].item()}
    assert parts == {"device": 50_000, "schedule": 37_500, "launch": 12_500}
    assert found["interval_ns"].item() == 100_000


def test_parts_are_compared_at_the_before_arm_s_batch_mix() -> None:
    """Before: batch 1 twice, batch 2 once. After ran batch 2 more often, and is no slower for it."""

    def arm(batches: list[int]) -> pd.DataFrame:
        columns = dict.fromkeys(PARTS, 0)
        return pd.DataFrame(
            [columns | {"batch": each, "interval_ns": each * 1000, "device": each * 1000} for each in batches]
        )

    before, after = matched_means([arm([1, 1, 2]), arm([1, 2, 2, 2, 3])])
    assert before["device"] == after["device"] == pytest.approx(4 / 3)
    assert np.isnan(matched_means([arm([1]), arm([2])])[0]["device"])


def test_how_much_of_each_arm_the_shared_batches_are():
    one, other = (pd.DataFrame({"batch": batches}) for batches in ([1, 1, 2, 4], [2, 3]))
    assert matched_share([one, other]) == [0.25, 0.5]


# -- for any stamps ---------------------------------------------------------------------------------------

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))
NAMES = ("recv", "schedule", "metadata", "h2d", "launch", "wait.launch_done", "wait.copy_done", "append")


@st.composite
def any_steps(draw: st.DrawFn) -> pd.DataFrame:
    """Steps in the device's order, with phases anywhere: whatever a recorder may have written."""
    rows, at = [], 10
    for number in range(draw(st.integers(2, 6))):
        start = at + draw(st.integers(0, 20))
        at = start + draw(st.integers(1, 20))
        phases = draw(st.dictionaries(st.sampled_from((*NAMES, "output")), SPAN))
        rows.append(one_step(number, (start, at), phases))
    return frame(*rows)


@given(any_steps(), st.booleans())
def test_parts_add_up_to_the_interval_and_none_is_negative(steps: pd.DataFrame, thread: bool) -> None:
    found = attribute(steps, pd.DataFrame(), thread)
    assert (found[list(PARTS)].to_numpy() >= 0).all()
    assert (found[list(PARTS)].sum(axis=1) == found["interval_ns"]).all()
    idle = found["interval_ns"] - found["device"]
    assert exposed_host_us(decode_intervals(steps)) == pytest.approx(idle.mean() / 1000)


@given(
    st.lists(st.lists(SPAN, max_size=4), min_size=1, max_size=3),
    st.lists(SPAN, min_size=1, max_size=5),
)
def test_a_window_holds_what_was_painted_in_it(
    claims: list[list[tuple[int, int]]], windows: list[tuple[int, int]]
) -> None:
    def columns(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        array = np.array(spans, np.int64).reshape(-1, 2)
        return array[:, 0], array[:, 1]

    painted = paint([columns(each) for each in claims])
    found = painted.within(*columns(windows))
    for window, row in zip(windows, found, strict=True):
        for number in range(len(claims)):
            mine = [
                moment
                for moment in range(*window)
                if any(start <= moment < end for start, end in claims[number])
                and not any(start <= moment < end for each in claims[:number] for start, end in each)
            ]
            assert row[number] == len(mine)
