"""`bench sensitivity`, as a person runs it."""

import json
import os
from pathlib import Path

from tests.support.in_process import done, refused

SMALL = (
    *("sensitivity", "--engine", "overlap", "--pace", "3ms", "--trials", "2", "--max-batch-size", "4"),
    *("--num-requests", "4", "--arrival", "closed", "--concurrency", "4", "--max-new-tokens", "64"),
)


def test_a_serial_loop_feels_what_it_is_delayed_by_in_the_phases_that_it_has(tmp_path: Path) -> None:
    phases = ("--phase", "schedule", "--phase", "output-process", "--saves", "schedule=13us")
    said = done({**os.environ}, tmp_path, *SMALL, *phases, "--format", "json", "--out", "out")
    found = json.loads(said)
    (folder,) = (tmp_path / "out").iterdir()
    assert json.loads((folder / "sensitivity.json").read_text()) == found
    assert (folder / "sensitivity.png").stat().st_size > 1000
    assert found["batch"] == 4
    assert found["trials"] == 2
    assert found["left_out"] == {"output-process": "no step of these settings has it"}
    (schedule,) = found["phases"]
    assert schedule["phase"] == "schedule"
    assert schedule["us"] > 0
    assert schedule["points"][-1][1] > schedule["points"][0][1]  # delays of most of a step, and of hardly any
    (saving,) = found["savings"]
    assert saving["phase"] == "schedule"
    assert saving["gain_us"] in (0, schedule["slope"] * 13)  # 0 where the run was too short to tell


def test_what_can_not_be_delayed_is_refused_before_anything_boots(tmp_path: Path) -> None:
    for arguments, message in (
        ((*SMALL, "--phase", "shedule"), "did you mean schedule"),
        ((*SMALL, "--saves", "schedule=13"), "--saves needs PHASE=TIME"),
        (
            (*SMALL, "--phase", "append", "--saves", "schedule=13us"),
            "--saves schedule needs --phase schedule",
        ),
        (
            (*SMALL, "--arrival", "poisson", "--rate", "4"),
            "steps of one batch are measured; give --concurrency",
        ),
        ((*SMALL, "--trials", "1"), "at least 2 trials"),
        ((*SMALL, "--set", "recorder=off"), "recorder=off keeps none"),
        ((*SMALL, "--max-new-tokens", "8"), "--max-new-tokens of 16 or more"),
        (("sensitivity", "--engine", "transformers"), "names no phases"),
    ):
        assert message in refused({**os.environ}, tmp_path, *arguments)
        assert not list(tmp_path.iterdir())
