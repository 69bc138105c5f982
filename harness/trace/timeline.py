"""What every process of an arm did within the window of a profiled round, on one clock.

A track is a thread, a stream of the device, or the load generator. Ranges of a track nest or are disjoint.
Arrows lead from the phase that issued device work to that work, from the copy of a step's ids to the wait
for them, and from handing a step over to processing it in another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api

PHASE, DEVICE, LOAD = "phase", "device", "load"  # categories
COPIES = ("h2d", "d2h")  # device work that is no program
# In place of a pid, for the streams of a device without a process of its own: no pid is that large.
NO_PROCESS = (1 << 22) + 1
Facts = dict[str, int | str]
PROCESSES = {"engine": "engine", "output": "output process"}


class Track(msgspec.Struct, frozen=True):
    """A line of the timeline. `tid` is the thread's own where it has one."""

    pid: int
    tid: int
    process: str
    thread: str
    category: str


class Range(msgspec.Struct, frozen=True):
    """Something that happened on a track (an index into Timeline.tracks); what took no time ends where it
    starts. `facts`: step, batch, request, ..."""

    track: int
    name: str
    start_ns: int
    end_ns: int
    facts: Facts = {}


class Arrow(msgspec.Struct, frozen=True):
    """From within one range to within another."""

    name: str
    step: int
    from_track: int
    from_ns: int
    to_track: int
    to_ns: int


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. The window is [opened_ns, closed_ns]; ranges that are only partly in it are here whole."""

    arm: str
    opened_ns: int
    closed_ns: int
    tracks: list[Track]
    ranges: list[Range]
    arrows: list[Arrow]


def timeline(
    arm: str,
    profile: api.Profile,
    work: pd.DataFrame,
    steps: pd.DataFrame,
    requests: pd.DataFrame,
    pids: Mapping[str, int],
    device: Mapping[str, str],
) -> Timeline:
    """From what was recorded in a profiled round: the frames of harness.run.records, the pids of all
    processes by role, and what the engine says of its device."""
    window = _Window(profile.opened_ns, profile.closed_ns)
    window.add_load(pids["load_generator"], requests)
    for host in profile.hosts:
        window.add_host(host)
    kinds = {int(row.step): (str(row.kind), int(row.batch)) for row in steps.itertuples()}
    window.add_device(profile.streams, with_steps(work), kinds, pids.get("device", NO_PROCESS), device)
    return Timeline(
        arm=arm,
        opened_ns=profile.opened_ns,
        closed_ns=profile.closed_ns,
        tracks=window.tracks,
        ranges=window.ranges,
        arrows=list(_arrows(window.tracks, window.ranges)),
    )


class _Window:
    """What is at least partly in it, as it is put together."""

    def __init__(self, opened_ns: int, closed_ns: int) -> None:
        self._opened_ns, self._closed_ns = opened_ns, closed_ns
        self.tracks: list[Track] = []
        self.ranges: list[Range] = []

    def _holds(self, start_ns: int, end_ns: int) -> bool:
        return start_ns < self._closed_ns and end_ns > self._opened_ns

    def _track(self, pid: int, tid: int, process: str, thread: str, category: str) -> int:
        self.tracks.append(Track(pid, tid, process, thread, category))
        return len(self.tracks) - 1

    def add_load(self, pid: int, requests: pd.DataFrame) -> None:
        """Requests as they were sent, and chunks as they came, those of one message as one range."""
        track = self._track(pid, pid, "load generator", "load generator", LOAD)
        for row in requests.itertuples():
            sent, submitted = int(row.sent_ns), int(row.submitted_ns)
            if self._holds(sent, submitted):
                self.ranges.append(Range(track, "send", sent, submitted, {"request": int(row.request)}))
        came: dict[int, list[int]] = {}
        for chunks, tokens in zip(requests["chunk_ns"], requests["chunk_tokens"], strict=True):
            for at, count in zip(chunks.tolist(), tokens.tolist(), strict=True):
                came.setdefault(at, []).append(count)
        for at, counts in came.items():
            if self._holds(at, at):
                facts: Facts = {"requests": len(counts), "tokens": sum(counts)}
                self.ranges.append(Range(track, "chunks", at, at, facts))

    def add_host(self, host: api.HostRanges) -> None:
        """The threads of one process, those that did something."""
        rows = np.frombuffer(host.data, dtype=np.int64).reshape(host.rows, 5)
        process = PROCESSES.get(host.role, host.role)
        places: dict[int, int] = {}
        for thread, name, step, start, end in rows.tolist():
            if self._holds(start, end):
                if thread not in places:
                    shown = host.threads[thread] or process
                    places[thread] = self._track(host.pid, thread, process, shown, PHASE)
                self.ranges.append(Range(places[thread], host.names[name], start, end, {"step": step}))

    def add_device(
        self,
        streams: Mapping[str, str],
        work: pd.DataFrame,
        kinds: Mapping[int, tuple[str, int]],
        pid: int,
        device: Mapping[str, str],
    ) -> None:
        """Streams, in the order in which they first work. A program is named as its step's kind is."""
        places: dict[str, int] = {}
        ends: dict[str, int] = {}
        for row in work.itertuples():
            stream, name = streams[str(row.kind)], str(row.kind)
            # Device times of events are rounded: one may seem to begin some ns before the last one ends.
            start = max(int(row.start_ns), ends.get(stream, 0))
            end = max(start, int(row.end_ns))
            if not self._holds(start, end):
                continue
            ends[stream] = end
            if stream not in places:
                about = f"device ({device['kind']})", f"stream {stream}"
                places[stream] = self._track(pid, len(places) + 1, *about, DEVICE)
            facts: Facts = {"step": int(row.step), "device": device["name"]}
            if name == "program":
                name, facts["batch"] = kinds.get(int(row.step), ("program", 0))
            self.ranges.append(Range(places[stream], name, start, end, facts))


def with_steps(work: pd.DataFrame) -> pd.DataFrame:
    """Device work in the order of time, each copy with the step that it belongs to. The order of the streams
    says which: metadata is copied before the program that reads it, ids after the one that made them and
    before the next. -1 where that program is not there."""
    ordered = work.sort_values("start_ns", kind="stable").reset_index(drop=True)
    programs = ordered["step"].where(ordered["kind"] == "program")
    step = ordered["step"].copy()
    step = step.mask(ordered["kind"] == "h2d", programs.bfill())
    step = step.mask(ordered["kind"] == "d2h", programs.ffill())
    ordered["step"] = step.fillna(-1).astype("int64")
    return ordered


def _arrows(tracks: list[Track], ranges: list[Range]) -> Iterator[Arrow]:
    """Both ends of an arrow lie within a range, its last nanosecond excluded."""
    host = _by_step(ranges, (index for index, track in enumerate(tracks) if track.category == PHASE))
    device = _by_step(ranges, (index for index, track in enumerate(tracks) if track.category == DEVICE))
    engine = next((track.pid for track in tracks if track.process == PROCESSES["engine"]), None)
    for step in sorted(host):
        here, there = host[step], device.get(step, [])
        programs = [each for each in there if each.name not in COPIES]
        for each in there:
            issued = _first(here, _issued_in(each, programs))
            if issued is not None and issued.start_ns <= each.start_ns:
                what = each.name if each.name in COPIES else "launch"
                yield Arrow(what, step, issued.track, issued.start_ns, each.track, each.start_ns)
        wait = _first(here, "wait.copy_done")
        # Where copies are not timed, the end of the program stands in: it is close to theirs.
        done = [each for each in there if each.name == "d2h"] or programs
        if wait is not None and done and done[-1].end_ns <= wait.end_ns:
            yield Arrow("copy_done", step, done[-1].track, _last(done[-1]), wait.track, _last(wait))
        outputs = [each for each in here if each.name == "output"]
        handed = [each for each in outputs if tracks[each.track].pid == engine]
        taken = [each for each in outputs if tracks[each.track].pid != engine]
        if handed and taken:
            start, end = handed[0], taken[0]
            yield Arrow("hand over", step, start.track, start.start_ns, end.track, end.start_ns)


def _issued_in(work: Range, programs: list[Range]) -> str:
    """The phase that device work comes from. Ids that come back on the stream of the program are copied by
    whoever waits for them; on another stream their copy is issued with the launch."""
    if work.name == "h2d":
        return "h2d"
    blocking = work.name == "d2h" and any(each.track == work.track for each in programs)
    return "wait.copy_done" if blocking else "launch"


def _by_step(ranges: list[Range], tracks: Iterable[int]) -> dict[int, list[Range]]:
    wanted = set(tracks)
    found: dict[int, list[Range]] = {}
    for each in sorted((each for each in ranges if each.track in wanted), key=lambda each: each.start_ns):
        found.setdefault(int(each.facts["step"]), []).append(each)
    return found


def _first(ranges: list[Range], name: str) -> Range | None:
    return next((each for each in ranges if each.name == name), None)


def _last(range_: Range) -> int:
    return max(range_.start_ns, range_.end_ns - 1)
