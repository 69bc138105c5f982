"""What idle time is put down to, and how lengths are summed up."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.harness.trace import analysis
from tests.support import nsys_export as made
from tests.support.traces import SPLIT, export, part, values


def test_idle_time_is_split_by_what_the_launching_thread_did(tmp_path: Path) -> None:
    """2000 to 5000: the thread was in a stream synchronization for 700 (the stream wait blocks no thread),
    elsewhere for 1300, and 1000 in the launch. 6000 to 7000 the work was queued, 8000 to 9000 its call is not
    known."""
    row = values(part(export(tmp_path, SPLIT), "devices"), "0")
    assert row == pytest.approx(
        {
            "window_ms": 0.009,
            "busy_ms": 0.0035,
            "busy": 3500 / 9000,
            "copy_only_ms": 0.0005,
            "idle_ms": 0.005,
            "host_wait_ms": 0.0013,
            "sync_wait_ms": 0.0007,
            "launch_wait_ms": 0.001,
            "other_ms": 0.002,
        }
    )


def test_another_threads_synchronization_is_not_the_launching_threads(tmp_path: Path) -> None:
    tables = {name: [dict(row) for row in rows] for name, rows in SPLIT.items()}
    tables["CUPTI_ACTIVITY_KIND_RUNTIME"][1]["globalTid"] = made.process(1) | 6
    row = values(part(export(tmp_path, tables), "devices"), "0")
    assert row["sync_wait_ms"] == 0
    assert row["host_wait_ms"] == pytest.approx(0.002)


def test_a_device_that_stops_early_is_idle_to_the_end_of_the_last(tmp_path: Path) -> None:
    kernels = [made.kernel(0, 100), made.kernel(0, 1000, device=1)]
    found = part(export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": kernels}), "devices")
    assert [row.key for row in found.rows] == [("0",), ("1",)]
    assert values(found, "0")["other_ms"] == pytest.approx(0.0009)
    assert values(found, "1")["idle_ms"] == 0


def test_a_trace_without_length_has_no_shares(tmp_path: Path) -> None:
    found = part(export(tmp_path, {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(5, 5)]}), "devices")
    assert values(found, "0")["busy"] is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=30))
def test_groups_have_numpys_percentiles(rows: list[tuple[int, int]]) -> None:
    keys, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    for group in analysis.grouped(keys, lengths, (50, 95, 99)):
        mine = lengths[keys == group.key]
        assert (group.count, group.total) == (len(mine), mine.sum())
        assert group.percentiles == pytest.approx(np.percentile(mine, (50, 95, 99)).tolist())
