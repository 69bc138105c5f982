"""Whether a Chrome trace is one that Perfetto and chrome://tracing show as it was meant.

Perfetto's own parser is a program that its Python package fetches from the network, so this is written out
after the format's description: what each event needs, ranges that nest, arrows with both ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}
ROUNDING = 1e-3  # us: a nanosecond, which a decimal of a microsecond may be off by

Event = Mapping[str, Any]


def faults(document: Any) -> list[str]:
    """What is wrong with a decoded trace, a line each; empty where nothing is."""
    events = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(events, Sequence) or not all(isinstance(each, Mapping) for each in events):
        return ["neither a list of events nor an object with one as traceEvents"]
    found = [f"event {place}: {fault}" for place, each in enumerate(events) for fault in _of_event(each)]
    return found or [*_of_names(events), *_of_nesting(events), *_of_arrows(events)]


def _of_event(event: Event) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in ("X", "M", "s", "f"):
        yield f"ph is {phase!r}"
        return
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield "has no name"
    for key in ("pid", "tid"):
        if not isinstance(event.get(key), int):
            yield f"{key} is no whole number"
    if phase == "M":
        kind = METADATA.get(event.get("name", ""))
        if kind is None or kind not in event.get("args", {}):
            yield f"metadata {event.get('name')!r} without its argument"
        return
    if not isinstance(event.get("cat"), str) or not event["cat"]:
        yield "has no category"
    for key in ("ts", "dur") if phase == "X" else ("ts",):
        value = event.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            yield f"{key} is {value!r}"
    if phase != "X" and not isinstance(event.get("id"), int | str):
        yield "an arrow without id"
    if phase == "f" and event.get("bp") != "e":
        yield 'an arrow that ends without bp "e", so at the next range instead of the one around it'


def _track(event: Event) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _ranges(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    """Complete events of each track, outer ones first."""
    tracks = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            tracks[_track(each)].append(each)
    return {
        track: sorted(found, key=lambda each: (each["ts"], -each["dur"])) for track, found in tracks.items()
    }


def _of_names(events: Sequence[Event]) -> Iterator[str]:
    named = {(each["name"], *_track(each)) for each in events if each["ph"] == "M"}
    processes = {pid for name, pid, _ in named if name == "process_name"}
    for pid, tid in _ranges(events):
        if ("thread_name", pid, tid) not in named:
            yield f"track {pid}/{tid} has no thread_name"
        if pid not in processes:
            yield f"process {pid} has no process_name"


def _of_nesting(events: Sequence[Event]) -> Iterator[str]:
    for track, ranges in _ranges(events).items():
        around: list[Event] = []
        for each in ranges:
            while around and each["ts"] >= _end(around[-1]) - ROUNDING:
                around.pop()
            if around and _end(each) > _end(around[-1]) + ROUNDING:
                outer = around[-1]["name"]
                yield f"track {track[0]}/{track[1]}: {each['name']} outlasts {outer} that it began in"
            around.append(each)


def _of_arrows(events: Sequence[Event]) -> Iterator[str]:
    covers: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for track, ranges in _ranges(events).items():
        for each in ranges:
            if not covers[track] or each["ts"] >= covers[track][-1][1] - ROUNDING:
                covers[track].append((each["ts"], _end(each)))
    arrows: dict[tuple[Any, ...], dict[str, list[Event]]] = defaultdict(lambda: {"s": [], "f": []})
    for each in events:
        if each["ph"] in "sf":
            arrows[each["cat"], each["name"], each["id"]][each["ph"]].append(each)
    for (_, name, number), ends in arrows.items():
        what = f"arrow {name} {number}"
        if len(ends["s"]) != 1 or len(ends["f"]) != 1:
            yield f"{what} has {len(ends['s'])} starts and {len(ends['f'])} ends"
            continue
        start, end = ends["s"][0], ends["f"][0]
        if start["ts"] > end["ts"] + ROUNDING:
            yield f"{what} ends before it starts"
        for each in (start, end):
            outermost = covers[_track(each)]
            place = bisect_right(outermost, each["ts"] + ROUNDING, key=lambda pair: pair[0]) - 1
            if place < 0 or each["ts"] > outermost[place][1] + ROUNDING:
                yield f"{what} touches no range of track {each['pid']}/{each['tid']}"


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
