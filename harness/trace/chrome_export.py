"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Times are in us with three decimals, from the start of the window on; `otherData` says when that was by
perf_counter_ns. What is only partly in the window is cut at its edge: whole, it would count for a step more
than there are, in one arm and not in another. Arrows are flow events: `s` on the track that they come from,
`f` (binding to the range around it) on the one where they end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from overlap_bench.harness.trace.timeline import PROCESSES, Timeline, Track

ENGINE, OUTPUT = PROCESSES["engine"], PROCESSES["output"]
Event = dict[str, object]


def chrome_trace(timeline: Timeline, about: Mapping[str, object]) -> bytes:
    """The file's content; `about` is kept in it for people."""
    base = timeline.opened_ns
    document = {
        "traceEvents": [*_names(timeline), *_ranges(timeline, base), *_arrows(timeline, base)],
        "displayTimeUnit": "ms",
        "otherData": {
            "arm": timeline.arm,
            "profiled": "these times were taken while profiling; never compare them with measured ones",
            "base_perf_counter_ns": base,
            "window_us": [_us(timeline.opened_ns, base), _us(timeline.closed_ns, base)],
            **about,
        },
    }
    return msgspec.json.encode(document) + b"\n"


def _us(ns: int, base: int) -> float:
    return (ns - base) / 1e3


def _on(track: Track) -> dict[str, int]:
    return {"pid": track.pid, "tid": track.tid}


def _names(timeline: Timeline) -> Iterator[Event]:
    """Names of processes and threads, in the order in which they are to be shown."""
    seen: set[int] = set()
    for order, track in enumerate(timeline.tracks):
        here: Event = {"ph": "M", **_on(track)}
        if track.pid not in seen:
            seen.add(track.pid)
            yield {**here, "name": "process_name", "args": {"name": track.process}}
            yield {**here, "name": "process_sort_index", "args": {"sort_index": order}}
        yield {**here, "name": "thread_name", "args": {"name": track.thread}}
        yield {**here, "name": "thread_sort_index", "args": {"sort_index": order}}


def _ranges(timeline: Timeline, base: int) -> Iterator[Event]:
    """A phase of the output process that is called as one of the engine's says whose it is: a table by names
    would add them up."""
    by_engine = {each.name for each in timeline.ranges if timeline.tracks[each.track].process == ENGINE}
    for each in timeline.ranges:
        track = timeline.tracks[each.track]
        start, end = max(each.start_ns, timeline.opened_ns), min(each.end_ns, timeline.closed_ns)
        shared = track.process == OUTPUT and each.name in by_engine
        yield {
            "ph": "X",
            "name": f"{OUTPUT}: {each.name}" if shared else each.name,
            "cat": track.category,
            **_on(track),
            "ts": _us(start, base),
            "dur": _us(end, start),
            "args": each.facts,
        }


def _arrows(timeline: Timeline, base: int) -> Iterator[Event]:
    for number, arrow in enumerate(timeline.arrows):
        if arrow.from_ns < timeline.opened_ns or arrow.to_ns >= timeline.closed_ns:
            continue
        ends = (
            ({"ph": "s"}, arrow.from_track, arrow.from_ns),
            ({"ph": "f", "bp": "e"}, arrow.to_track, arrow.to_ns),
        )
        for kind, place, at in ends:
            yield {
                **kind,
                "id": number,
                "name": arrow.name,
                "cat": arrow.name,
                **_on(timeline.tracks[place]),
                "ts": _us(at, base),
                "args": {"step": arrow.step},
            }
