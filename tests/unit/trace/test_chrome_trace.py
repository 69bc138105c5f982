"""The check of Chrome traces finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chrome_trace import faults

HOST, DEVICE = {"pid": 1, "tid": 1}, {"pid": 2, "tid": 7}


def good() -> list[dict[str, Any]]:
    named = [
        {"ph": "M", "name": kind, **track, "args": {"name": "x"}}
        for track in (HOST, DEVICE)
        for kind in ("process_name", "thread_name")
    ]
    return [
        *named,
        {"ph": "X", "name": "step", "cat": "phase", "ts": 0.0, "dur": 9.0, **HOST},
        {"ph": "X", "name": "launch", "cat": "phase", "ts": 0.0, "dur": 4.0, **HOST},
        {"ph": "X", "name": "wait", "cat": "phase", "ts": 4.0, "dur": 5.0, **HOST},
        {"ph": "X", "name": "decode", "cat": "device", "ts": 3.0, "dur": 4.0, **DEVICE},
        {"ph": "s", "name": "launch", "cat": "launch", "id": 1, "ts": 2.0, **HOST},
        {"ph": "f", "bp": "e", "name": "launch", "cat": "launch", "id": 1, "ts": 3.0, **DEVICE},
    ]


def test_a_sound_trace_has_no_faults() -> None:
    assert faults(good()) == []
    assert faults({"traceEvents": good()}) == []


@pytest.mark.parametrize(
    ("place", "change", "fault"),
    [
        (4, {"dur": 8.5}, "wait outlasts step"),
        (6, {"ts": 3.5}, "wait outlasts launch"),
        (7, {"dur": -1.0}, "dur is -1.0"),
        (7, {"ts": float("nan")}, "ts is nan"),
        (7, {"tid": "7"}, "tid is no whole number"),
        (7, {"name": ""}, "has no name"),
        (7, {"ph": "Z"}, "ph is 'Z'"),
        (7, {"ts": 5.0}, "touches no range of track 2/7"),
        (8, {"id": 2}, "has 1 starts and 0 ends"),
        (8, {"ts": 3.5}, "ends before it starts"),
        (9, {"bp": None}, 'without bp "e"'),
        (3, {"name": "thread_sort_index"}, "without its argument"),
        (3, {"tid": 8}, "track 2/7 has no thread_name"),
        (2, {"pid": 3}, "process 2 has no process_name"),
    ],
)
def test_a_fault_is_found(place: int, change: dict[str, Any], fault: str) -> None:
    events = good()
    events[place].update(change)
    assert any(fault in line for line in faults(events)), faults(events)


def test_something_else_is_no_trace() -> None:
    assert faults({"events": []}) == ["neither a list of events nor an object with one as traceEvents"]
