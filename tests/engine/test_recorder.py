"""Step records: what a phase cost, and what did not fit. Tracing: what a tool and a timeline are told."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap.recorder import (
    LAUNCH,
    OUTPUT,
    RECV,
    SCHEDULE,
    NoRecorder,
    Recorder,
    Tracer,
    make_recorder,
)
from overlap_bench.engines.tracing import INJECTIONS, SETTLED
from tests.support.bench_command import wait_until
from tests.support.in_process_engine import column, serve


def test_a_phase_that_comes_twice_in_a_step_is_summed_up():
    records = Recorder()
    records.begin_round(10)
    records.add_step(10, "decode", batch=3, tokens=4, preempted=2)
    for _ in range(2):
        records.end(OUTPUT, 10, records.begin(OUTPUT, 10))
    table = records.table()
    row = dict(zip(table.columns, np.frombuffer(table.data, dtype=np.int64), strict=True))
    assert (row["step"], row["kind"], row["batch"], row["tokens"]) == (10, 1, 3, 4)
    assert row["output.end"] > row["output.start"] > 0
    assert row["h2d.start"] == row["h2d.end"] == -1


def test_steps_that_do_not_fit_are_counted_and_a_new_round_forgets_them(monkeypatch):
    monkeypatch.setattr(Recorder, "most_steps", 2)
    records = Recorder()
    records.begin_round(0)
    for step in range(5):
        records.add_step(step, "decode", 1, 1, 0)
        records.end(OUTPUT, step, records.begin(OUTPUT, step))
    assert records.table().rows == 2
    assert records.lost == 3
    records.begin_round(5)
    assert (records.table().rows, records.lost) == (0, 0)


def test_a_recv_of_a_step_that_never_came_is_not_left_to_the_next_round():
    records = Recorder()
    records.begin_round(0)
    records.end(RECV, 0, records.begin(RECV, 0))  # nothing was there, and no step came of it
    records.begin_round(0)
    records.add_step(0, "decode", 1, 1, 0)
    table = records.table()
    row = dict(zip(table.columns, np.frombuffer(table.data, dtype=np.int64), strict=True))
    assert row["recv.start"] == row["recv.end"] == -1


# -- the window of a profiled round, and what is kept of it --------------------------------------------------


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    for variable in INJECTIONS:
        monkeypatch.delenv(variable, raising=False)
    return Tracer()


def steps(tracer: Tracer, kinds: list[str]) -> None:
    for number, kind in enumerate(kinds):
        began = tracer.begin(SCHEDULE, number)
        tracer.add_step(number, kind, 1, 1, 0)
        tracer.end(SCHEDULE, number, began)


def rows(ranges: api.HostRanges) -> np.ndarray:
    return np.frombuffer(ranges.data, dtype=np.int64).reshape(ranges.rows, 5)


def test_the_window_opens_where_decode_is_steady_and_holds_so_many_steps(tracer):
    tracer.begin_profile(0, 3)
    unsteady = ["decode"] * SETTLED + ["prefill"]
    steps(tracer, unsteady + ["decode"] * (SETTLED + 5))
    kept = rows(tracer.end_profile())
    opened = kept[(kept[:, 3] <= tracer.window.opened_ns) & (tracer.window.opened_ns <= kept[:, 4]), 2]
    closed = kept[(kept[:, 3] <= tracer.window.closed_ns) & (tracer.window.closed_ns <= kept[:, 4]), 2]
    assert opened.tolist() == [len(unsteady) + SETTLED]
    assert closed.tolist() == [len(unsteady) + SETTLED + 3]


def test_a_window_that_the_round_did_not_reach_the_end_of_was_not_closed(tracer):
    tracer.begin_profile(0, 3)
    steps(tracer, ["decode"] * (SETTLED + 2))
    assert tracer.window.opened_ns > 0
    assert tracer.window.closed_ns == -1


def test_every_range_is_kept_with_its_thread_also_the_second_of_a_step(tracer):
    tracer.begin_profile(0, 1)
    for _ in range(2):
        tracer.end(OUTPUT, 0, tracer.begin(OUTPUT, 0))
    tracer.end(RECV, -1, tracer.begin(RECV, 0))  # came to belong to no step
    go_on = threading.Event()

    def launch() -> None:
        tracer.end(LAUNCH, 0, tracer.begin(LAUNCH, 0))
        go_on.wait()

    thread = threading.Thread(target=launch, name="forward")
    thread.start()
    wait_until(lambda: len(tracer._ranges._kept or []) >= 3)
    kept = tracer.end_profile()
    go_on.set()
    thread.join()
    names = [(kept.threads[row[0]], kept.names[row[1]]) for row in rows(kept).tolist()]
    assert names == [("scheduler", "output"), ("scheduler", "output"), ("forward", "launch")]
    assert kept.pid == os.getpid()


def test_what_is_not_profiled_is_not_kept(tracer):
    tracer.begin_profile(0, 1)
    tracer.end_profile()
    tracer.begin_round(0)
    tracer.end(OUTPUT, 0, tracer.begin(OUTPUT, 0))
    assert tracer.end_profile().rows == 0


def test_without_a_tool_nothing_but_step_records_is_made(monkeypatch, tracer):
    assert type(make_recorder(True)) is Recorder
    assert type(make_recorder(False)) is NoRecorder
    monkeypatch.setenv(INJECTIONS[0], "/some/tool.so")
    assert type(make_recorder(True)) is Tracer
    assert type(make_recorder(False)) is NoRecorder


# -- NVTX, as a tool sees it ---------------------------------------------------------------------------------

SOME_STEPS = f"""
from overlap_bench.engines.overlap.recorder import APPEND, OUTPUT, SCHEDULE, Tracer
tracer = Tracer()
tracer.begin_profile(0, 2)
for step in range({SETTLED} + 3):
    began = tracer.begin(SCHEDULE, step)
    tracer.add_step(step, "decode", 1, 1, 0)
    tracer.end(SCHEDULE, step, began)
    outer = tracer.begin(APPEND, step)
    tracer.end(OUTPUT, step, tracer.begin(OUTPUT, step))
    tracer.end(APPEND, step, outer)
"""


def test_a_tool_sees_each_phase_in_its_domain_and_category_with_the_step_and_the_window(
    nvtx_tool: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "ranges"
    environment = {**os.environ, **nvtx_tool, "NVTX_TOOL_LOG": str(log), "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", SOME_STEPS], env=environment, check=True)
    (written,) = tmp_path.iterdir()
    seen = [line.split("\t") for line in written.read_text().splitlines()]
    phases = [
        (category, message, int(payload), int(depth))
        for domain, category, message, payload, _, depth in seen
        if domain == "engine"
    ]
    per_step = [("schedule", 0), ("append", 0), ("output", 1)]
    assert phases == [(name, name, step, depth) for step in range(SETTLED + 3) for name, depth in per_step]
    assert [each[:4] for each in seen if each[0] == "profile"] == [
        ["profile", "steady-decode", "steady-decode", "2"]
    ]


@pytest.mark.parametrize(("choice", "behind"), [("inline", "append.end"), ("deferred", "launch.end")])
def test_output_is_stamped_where_it_is_processed(device: Device, choice: str, behind: str) -> None:
    toggles = {"schedule": "serial", "launch": "inline", "output": choice}
    _, _, record = serve(device, toggles, [api.Request(1, [5, 6, 7], 6)])
    output, earlier, waited = (
        np.array(column(record, name)) for name in ("output.start", behind, "wait.copy_done.start")
    )
    assert (output >= earlier).all()
    assert ((output < waited) == (choice == "deferred")).all()


def test_a_step_behind_a_wait_has_no_recv_from_before_it(device: Device) -> None:
    """Under overlap the loop looks for a next step while the last one runs, finds none, and then waits."""
    waited: list[int] = []

    def ask_again(engine: api.Engine, events: list[api.Event]) -> None:
        if not waited and any(isinstance(event, api.Finish) for event in events):
            waited.append(1)
            engine.submit(api.Request(1, [5, 6, 7], 3))

    toggles = {"schedule": "overlap", "launch": "inline", "output": "inline"}
    _, _, record = serve(device, toggles, [api.Request(1, [5, 6, 7], 4)], meanwhile=ask_again, ends=2)
    recorded = [start >= 0 for start in column(record, "recv.start")]
    first = [step for step, kind in enumerate(column(record, "kind")) if kind == 0]
    assert len(first) == 2
    assert [step for step, known in enumerate(recorded) if not known] == first[1:]


# -- delays of a known size --------------------------------------------------------------------------------


def test_a_delay_is_spent_in_its_phase_of_each_step_and_stands_in_its_record():
    records = Recorder()
    records.begin_round(0)
    assert records.delay.put("schedule", 200_000) == 0
    for step in range(3):
        for phase in (SCHEDULE, LAUNCH):
            began = records.begin(phase, step)
            if phase == SCHEDULE:
                records.add_step(step, "decode", 1, 1, 0)
            records.end(phase, step, began)
    records.end(SCHEDULE, -1, records.begin(SCHEDULE, 3))  # no step came of it
    spent = records.delay.put("", 0)
    assert spent >= 3 * 200_000
    table = records.table()
    rows = np.frombuffer(table.data, dtype=np.int64).reshape(table.rows, -1)
    frame = dict(zip(table.columns, rows.T, strict=True))
    in_phase = (frame["schedule.end"] - frame["schedule.start"]).sum()
    assert in_phase >= spent
    assert ((frame["launch.end"] - frame["launch.start"]) < in_phase).all()
    assert records.delay.put("", 0) == 0
