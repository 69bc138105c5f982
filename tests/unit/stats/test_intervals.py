"""Unions and nesting of intervals, against sets of whole times."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_bench.harness.common import intervals
from overlap_bench.harness.trace import events

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def arrays(spans: list[tuple[int, int]]) -> tuple[events.Times, events.Times]:
    start = np.array([begin for begin, _ in spans], np.int64)
    return start, start + np.array([length for _, length in spans], np.int64)


def inside(spans: list[tuple[int, int]]) -> set[int]:
    return {time for begin, length in spans for time in range(begin, begin + length)}


@given(SPANS, SPANS)
def test_unions_cover_what_their_intervals_cover(
    spans: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    starts, ends = intervals.union(*arrays(spans))
    assert (starts[1:] > ends[:-1]).all()
    assert inside(list(zip(starts.tolist(), (ends - starts).tolist(), strict=True))) == inside(spans)
    assert intervals.length(*arrays(spans)) == len(inside(spans))
    low, high = arrays(windows)
    expected = [len(inside([window]) & inside(spans)) for window in windows]
    assert intervals.covered(starts, ends, low, high).tolist() == expected


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges that a thread pushed and popped, in the order in which it did."""
    found: list[tuple[int, int]] = []
    open_since: list[int] = []
    now = 0
    for _ in range(draw(st.integers(0, 20))):
        now += draw(st.integers(0, 3))
        if open_since and draw(st.booleans()):
            found.append((open_since.pop(), now))
        else:
            open_since.append(now)
    return found + [(start, now) for start in reversed(open_since)]


@given(nested(), st.lists(st.integers(0, 70), max_size=8))
@settings(max_examples=300)
def test_the_innermost_range_is_the_shortest_that_holds_a_time(
    spans: list[tuple[int, int]], times: list[int]
) -> None:
    starts = np.array([start for start, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    found = intervals.innermost(starts, ends, np.array(times, np.int64))
    for time, row in zip(times, found.tolist(), strict=True):
        holding = [end - start for start, end in spans if start <= time < end]
        assert (row == events.NONE) == (not holding)
        if holding:
            assert starts[row] <= time < ends[row]
            assert ends[row] - starts[row] == min(holding)
