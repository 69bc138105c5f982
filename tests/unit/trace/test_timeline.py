"""From what a profiled round recorded to tracks, ranges and arrows; to a Chrome trace; to a picture."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.trace import picture, trace_file
from overlap_bench.harness.trace.chrome_export import chrome_trace
from overlap_bench.harness.trace.timeline import NO_PROCESS, Range, Timeline, _arrows, timeline, with_steps

ENGINE, SCHEDULER, FORWARD, OUTPUT, DEVICE, GENERATOR = 100, 100, 101, 102, 103, 104
PIDS = {"engine": ENGINE, "output": OUTPUT, "device": DEVICE, "load_generator": GENERATOR}
STEP = 1000
# One step: thread, name, start, end; within STEP.
HOST = (
    (SCHEDULER, "schedule", 0, 50),
    (SCHEDULER, "metadata", 50, 80),
    (FORWARD, "h2d", 90, 150),
    (FORWARD, "launch", 150, 200),
    (SCHEDULER, "wait.copy_done", 80, 900),
    (SCHEDULER, "append", 900, 930),
    (SCHEDULER, "output", 930, 960),
)
WORK = (("h2d", 160, 165), ("h2d", 165, 170), ("program", 180, 800), ("d2h", 800, 810))


def host(role: str, pid: int, threads: dict[int, str], rows: list[tuple[int, int, int, int, int]]):
    data = array("q", [cell for row in rows for cell in row]).tobytes()
    return api.HostRanges(
        role=role, pid=pid, threads=threads, names=list(api.PHASES), rows=len(rows), data=data
    )


def example(
    steps: int = 8, *, arm: str = "before", output_process: bool = True, d2h_stream: str = "copy", **pids: int
) -> Timeline:
    """A round of so many steps, all but the first and the last in the window."""
    engine = [
        (thread, api.PHASES.index(name), step, step * STEP + start, step * STEP + end)
        for step in range(steps)
        for thread, name, start, end in HOST
    ]
    output = [
        (OUTPUT, api.PHASES.index("output"), step, step * STEP + 950, step * STEP + 1100)
        for step in range(steps)
    ]
    hosts = [host("engine", ENGINE, {SCHEDULER: "scheduler", FORWARD: "forward"}, engine)]
    if output_process:
        hosts.append(host("output", OUTPUT, {OUTPUT: "output"}, output))
    work = pd.DataFrame(
        [
            (kind, step if kind == "program" else -1, step * STEP + start, step * STEP + end)
            for step in range(steps)
            for kind, start, end in WORK
        ],
        columns=["kind", "step", "start_ns", "end_ns"],
    )
    return timeline(
        arm,
        api.Profile(
            opened_ns=STEP + 10,
            closed_ns=(steps - 1) * STEP + 10,
            hosts=hosts,
            streams={"program": "forward", "h2d": "forward", "d2h": d2h_stream},
        ),
        work,
        pd.DataFrame({"step": range(steps), "kind": "decode", "batch": 2}),
        pd.DataFrame(
            {
                "request": [0, 1],
                "sent_ns": [2000, 3000],
                "submitted_ns": [2010, 3010],
                "chunk_ns": [array_of(4000, 5000), array_of(4000, 99_000)],
                "chunk_tokens": [array_of(8, 8), array_of(1, 8)],
            }
        ),
        pids or PIDS,
        {"kind": "emulated", "name": "a core"},
    )


def array_of(*values: int):
    return pd.Series(values, dtype="int64").to_numpy()


def test_only_what_touches_the_window_is_there_and_that_whole():
    found = example(steps=6)
    per_step = {
        step: [each.name for each in found.ranges if each.facts.get("step") == step] for step in range(6)
    }
    assert per_step[0] == ["output"]  # of the output process, which is late
    assert per_step[1] == per_step[3]
    assert per_step[5] == ["schedule"]
    assert next(each.start_ns for each in found.ranges if each.name == "schedule") == STEP


def test_arrows_lead_to_device_work_from_its_phase_from_copy_to_wait_and_to_the_output_process():
    found = example()
    ends = {
        (arrow.name, arrow.step): (
            (found.tracks[arrow.from_track].thread, arrow.from_ns - arrow.step * STEP),
            (found.tracks[arrow.to_track].thread, arrow.to_ns - arrow.step * STEP),
        )
        for arrow in found.arrows
    }
    assert ends["h2d", 3] == (("forward", 90), ("stream forward", 165))  # the second of two
    assert ends["launch", 3] == (("forward", 150), ("stream forward", 180))
    assert ends["d2h", 3] == (("forward", 150), ("stream copy", 800))
    assert ends["copy_done", 3] == (("stream copy", 809), ("scheduler", 899))
    assert ends["hand over", 3] == (("scheduler", 930), ("output", 950))
    assert {step for _, step in ends} == {1, 2, 3, 4, 5, 6}


def test_ids_that_are_copied_on_the_programs_stream_come_from_the_wait_for_them():
    found = example(d2h_stream="forward")
    (arrow,) = (each for each in found.arrows if (each.name, each.step) == ("d2h", 3))
    assert arrow.from_ns == 3 * STEP + 80


def test_a_device_that_times_no_copies_has_its_ids_arrive_from_the_program():
    found = example()
    without = msgspec.structs.replace(
        found, ranges=[each for each in found.ranges if each.name not in ("h2d", "d2h")]
    )
    arrows = {(each.name, each.step): each for each in _arrows(without.tracks, without.ranges)}
    assert arrows["copy_done", 3].from_ns == 3 * STEP + 799


def test_a_device_without_a_process_has_tracks_of_its_own():
    found = example(engine=ENGINE, load_generator=GENERATOR)
    assert {track.pid for track in found.tracks if track.category == "device"} == {NO_PROCESS}


def test_chunks_that_came_in_one_message_are_one():
    load = [(each.name, each.start_ns, each.facts) for each in example().ranges if each.track == 0]
    assert load == [
        ("send", 2000, {"request": 0}),
        ("send", 3000, {"request": 1}),
        ("chunks", 4000, {"requests": 2, "tokens": 9}),
        ("chunks", 5000, {"requests": 1, "tokens": 8}),
    ]


@given(copies=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=12))
def test_a_copy_belongs_to_the_program_that_reads_or_made_it(copies: list[tuple[int, int]]):
    rows, expected, now = [], [], 0
    for step, (before, behind) in enumerate(copies):
        for kind, count in (("h2d", before), ("program", 1), ("d2h", behind)):
            for _ in range(count):
                rows.append((kind, step if kind == "program" else -1, now, now + 1))
                expected.append(step)
                now += 1
    frame = pd.DataFrame(rows, columns=["kind", "step", "start_ns", "end_ns"])
    shuffled = frame.sample(frac=1, random_state=1)
    assert with_steps(shuffled)["step"].tolist() == expected


def test_a_copy_whose_program_is_not_there_belongs_to_no_step():
    frame = pd.DataFrame(
        [("d2h", -1, 0, 1), ("program", 4, 2, 3), ("h2d", -1, 4, 5)],
        columns=["kind", "step", "start_ns", "end_ns"],
    )
    assert with_steps(frame)["step"].tolist() == [-1, 4, -1]


# -- the Chrome trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_process", [True, False])
def test_the_chrome_trace_has_every_track_range_and_arrow_to_the_nanosecond(output_process: bool) -> None:
    found = example(output_process=output_process)
    document = json.loads(chrome_trace(found, {"run": "it"}))
    assert document["otherData"]["run"] == "it"
    base = document["otherData"]["base_perf_counter_ns"]
    events: dict[str, list[dict[str, Any]]] = {kind: [] for kind in "MXsf"}
    for each in document["traceEvents"]:
        at = round(each.get("ts", 0) * 1000) + base
        events[each["ph"]].append({**each, "at": at, "track": (each["pid"], each["tid"])})
    names = {(each["name"], *each["track"]): each["args"].get("name") for each in events["M"]}
    for track in found.tracks:
        assert names["thread_name", track.pid, track.tid] == track.thread
    assert {pid for name, pid, _ in names if name == "process_name"} == {each.pid for each in found.tracks}
    on = [(track.pid, track.tid) for track in found.tracks]
    opened, closed = found.opened_ns, found.closed_ns
    assert document["otherData"]["window_us"] == [0, (closed - opened) / 1e3]
    # Whole, a range beyond an edge would count as one step more.
    cut = [(each, max(each.start_ns, opened), min(each.end_ns, closed)) for each in found.ranges]

    def named(each: Range) -> str:
        process = found.tracks[each.track].process
        return f"{process}: {each.name}" if process == "output process" else each.name  # two are "output"

    assert [(each["name"], each["track"], each["at"], round(1000 * each["dur"])) for each in events["X"]] == [
        (named(each), on[each.track], start, end - start) for each, start, end in cut
    ]
    program = next(each for each in events["X"] if each["name"] == "decode" and each["args"]["step"] == 3)
    assert program["args"] == {"step": 3, "device": "a core", "batch": 2}
    for number, arrow in enumerate(found.arrows):
        if arrow.from_ns < opened or arrow.to_ns >= closed:
            assert not [each for each in (*events["s"], *events["f"]) if each["id"] == number]
            continue
        start, end = (next(each for each in events[kind] if each["id"] == number) for kind in "sf")
        assert (start["track"], start["at"]) == (on[arrow.from_track], arrow.from_ns)
        assert (end["track"], end["at"], end["bp"]) == (on[arrow.to_track], arrow.to_ns, "e")
        assert start["at"] <= end["at"]
        for track, at in ((arrow.from_track, arrow.from_ns), (arrow.to_track, arrow.to_ns)):
            assert any(each.track == track and each.start_ns <= at <= each.end_ns for each in found.ranges)


# -- the picture ------------------------------------------------------------------------------------------


def test_the_picture_has_before_above_after_with_host_above_device(tmp_path: Path) -> None:
    panels = [(example(arm=arm), f"{arm}: h2d={choice}") for arm, choice in (("before", "a"), ("after", "b"))]
    files = [tmp_path / "steps.png", tmp_path / "steps.svg"]
    picture.draw(panels, "a heading", files)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    drawn = files[1].read_text()
    places = [drawn.index(text) for text in ("before: h2d=a", "after: h2d=b")]
    assert places == sorted(places)
    assert drawn.index(">scheduler<") < drawn.index(">stream forward<") < places[1]
    assert "a heading" in drawn


def test_the_steps_of_the_picture_are_typical_not_the_disturbed_ones() -> None:
    found = example(steps=30)
    late = 50 * STEP  # something held up step 14, and all behind it
    disturbed = msgspec.structs.replace(
        found,
        ranges=[
            msgspec.structs.replace(each, start_ns=each.start_ns + late, end_ns=each.end_ns + late)
            if each.start_ns > 14 * STEP
            else each
            for each in found.ranges
        ],
    )
    few = picture._chosen(disturbed, "").few
    assert few.last_ns - few.zero_ns == picture.STEPS * STEP


def test_a_window_without_device_work_can_not_be_drawn(tmp_path: Path) -> None:
    found = example()
    idle = msgspec.structs.replace(found, ranges=[each for each in found.ranges if each.track < 4])
    with pytest.raises(ValueError, match="the device did nothing"):
        picture.draw([(idle, "x")], "x", [tmp_path / "x.png"])


def test_the_copies_of_a_phase_come_from_one_call_as_long_as_the_phase(tmp_path: Path) -> None:
    """Each has an arrow of its own, from the same start: the time of the call is not to count twice."""
    path = tmp_path / "timeline.json"
    path.write_bytes(chrome_trace(example(), {}))
    found = trace_file.read(path)
    h2d = found.names.index("h2d")
    assert (found.calls.name == h2d).sum() == 6, "of six whole steps"
    assert (found.work.name == h2d).sum() > 6


def test_an_arm_without_launches_has_no_host_part_in_the_picture(tmp_path: Path) -> None:
    found = example()
    without = msgspec.structs.replace(
        found, ranges=[each for each in found.ranges if each.name not in ("launch", "wait.copy_done")]
    )
    assert picture._chosen(without, "").host is None
    file = tmp_path / "steps.svg"
    picture.draw([(found, "before"), (without, "after")], "a heading", [file])
    assert file.read_text().count("no launch was recorded") == 1
