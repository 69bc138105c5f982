"""Step records: what a phase cost, and what did not fit."""

from __future__ import annotations

import numpy as np
import pytest

from engines import api
from engines.devices.base import Device
from engines.overlap import recorder
from engines.overlap.recorder import OUTPUT, Recorder
from tests.serving import column, serve


def test_a_phase_that_comes_twice_in_a_step_is_summed_up():
    records = Recorder()
    records.begin_round(10)
    records.add_step(10, "decode", batch=3, tokens=4, preempted=2)
    for _ in range(2):
        records.end(OUTPUT, 10, records.begin(OUTPUT))
    table = records.table()
    row = dict(zip(table.columns, np.frombuffer(table.data, dtype=np.int64), strict=True))
    assert (row["step"], row["kind"], row["batch"], row["tokens"]) == (10, 1, 3, 4)
    assert row["output.end"] > row["output.start"] > 0
    assert row["h2d.start"] == row["h2d.end"] == -1


def test_steps_that_do_not_fit_are_counted_and_a_new_round_forgets_them(monkeypatch):
    monkeypatch.setattr(recorder, "MOST_STEPS", 2)
    records = Recorder()
    records.begin_round(0)
    for step in range(5):
        records.add_step(step, "decode", 1, 1, 0)
        records.end(OUTPUT, step, records.begin(OUTPUT))
    assert records.table().rows == 2
    assert records.lost == 3
    records.begin_round(5)
    assert (records.table().rows, records.lost) == (0, 0)


@pytest.mark.parametrize(("choice", "behind"), [("inline", "append.end"), ("deferred", "launch.end")])
def test_output_is_stamped_where_it_is_processed(device: Device, choice: str, behind: str) -> None:
    toggles = {"schedule": "serial", "launch": "inline", "output": choice}
    _, _, record = serve(device, toggles, [api.Request(1, [5, 6, 7], 6)])
    output, earlier, waited = (
        np.array(column(record, name)) for name in ("output.start", behind, "wait.copy_done.start")
    )
    assert (output >= earlier).all()
    assert ((output < waited) == (choice == "deferred")).all()
