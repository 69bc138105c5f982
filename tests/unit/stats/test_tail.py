"""What made the late ones late, on windows whose contents are written down."""

import numpy as np
import pandas as pd
import pytest

from overlap_bench.harness.analysis.tail import ACTIVITIES, TAILS, late, split
from overlap_bench.harness.metrics.requests import distributions
from tests.unit.metrics.test_attribution import frame, one_step
from tests.unit.metrics.test_metrics import request

MS = 1_000_000


def activities(row: np.ndarray) -> dict[str, float]:
    return {name: value / MS for name, value in zip(ACTIVITIES, row, strict=True) if value}


def test_a_window_is_split_by_phase_and_kind_of_step() -> None:
    """A request waits from 107 to 111 ms, and its first token comes at 118, two ITLs of 10 ms follow."""
    steps = frame(
        one_step(
            0,
            (100_000, 110_000),
            {"wait.copy_done": (99_000, 110_200), "append": (110_200, 110_500), "output": (110_500, 111_500)},
        ),
        one_step(1, (112_000, 117_000), {"wait.copy_done": (112_000, 117_500)}, kind="prefill"),
        one_step(2, (118_000, 127_000), {"wait.copy_done": (119_000, 128_000)}),
    )
    found = split(pd.DataFrame([request(token_ns=[118, 128])]), steps)
    assert activities(found["queue_wait_ms"][0]) == {
        "wait.copy_done (decode)": 3.2,
        "append (decode)": 0.3,
        "output (decode)": 0.5,
    }
    assert activities(found["ttft_ms"][0]) == {
        "wait.copy_done (decode)": 7.2 + 1,
        "wait.copy_done (prefill)": 5.5,
        "append (decode)": 0.3,
        "output (decode)": 1.0,
        "between phases": 2.0,
    }
    assert activities(found["itl_token_ms"][0]) == {"wait.copy_done (decode)": 9, "between phases": 1}
    assert activities(found["submit_lag_ms"][0]) == {"wait.copy_done (decode)": 3}


def test_a_launch_on_another_thread_does_not_hide_what_the_scheduler_waits_for() -> None:
    steps = frame(
        one_step(
            0, (100_000, 110_000), {"wait.launch_done": (103_000, 106_000), "launch": (102_000, 107_000)}
        )
    )
    parts = split(pd.DataFrame([request(token_ns=[101, 107])]), steps)["itl_token_ms"][0]
    assert activities(parts) == {
        "wait.launch_done (decode)": 3,
        "launch (decode)": 2,
        "between phases": 1,
    }


def test_samples_are_those_of_the_metrics() -> None:
    requests = pd.DataFrame(
        [request(), request(sent_ns=99, token_ns=[], chunk_ns=[], chunk_tokens=[]), request(error="gone")]
    )
    steps = frame(one_step(0, (100_000, 110_000), {"wait.copy_done": (99_000, 110_200)}))
    expected = distributions(requests[requests["error"] == ""])
    for metric, parts in split(requests, steps).items():
        assert sorted(parts.sum(axis=1) / MS) == pytest.approx(sorted(expected[metric])), metric


def test_causes_add_up_to_how_late_the_late_ones_were() -> None:
    """99 samples of 1 ms of output, and one that also stood behind a prefill for 9 ms."""
    output, prefill = (ACTIVITIES.index(name) for name in ("output (decode)", "wait.copy_done (prefill)"))
    parts = np.zeros((100, len(ACTIVITIES)), np.int64)
    parts[:, output] = MS
    parts[7, prefill] = 9 * MS
    found = late("before", "ttft_ms", [parts[:50], parts[50:]], 99)
    assert (found.samples, found.typical, found.late) == (100, 1.0, 10.0)
    assert found.causes == [("wait.copy_done (prefill)", 9.0)]
    assert sum(more for _, more in found.causes) == pytest.approx(found.late - found.typical)


def test_without_a_sample_there_is_no_tail() -> None:
    assert late("before", TAILS[0], [np.zeros((0, len(ACTIVITIES)), np.int64)], 95) is None
