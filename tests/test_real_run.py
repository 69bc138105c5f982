"""`bench run` on the overlap engine itself: what is kept when one of its own processes is killed, and what
two arms of it give."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.bench_command import TESTS, Bench, last_line, start

DEATH_LIMIT_S = 10
SERVING = 100  # voluntary switches: a process that serves has one for each step, and five when it has booted
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS.parent), "COLUMNS": "120"}
SMALL = ("--device", "emulated", "--rounds", "1", "--max-new-tokens", "64", "--concurrency", "8")
# One arm, which boots in half the time; long rounds, so that the process dies inside one.
ALONE = ("--engine", "overlap", "--set", "output=process", "--blocks", "2", "--num-requests", "64")


def kill_after(bench: Bench, done: str, word: str) -> str:
    """Once `done` is said, kill the process with `word` in its command, in a round; the run's last line."""
    bench.wait_for(f"{done} done", seconds=90)
    victim = bench.find(word, seconds=60)
    deadline = time.monotonic() + 120
    while victim.num_ctx_switches().voluntary < SERVING:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    code, _, stderr = bench.end(DEATH_LIMIT_S)
    assert code == 4, stderr
    assert not bench.left()
    line = last_line(stderr)
    assert line.startswith("bench: the ")
    assert f"(pid {victim.pid})" in line
    assert "--resume" in line
    return line


def test_a_killed_device_or_output_process_ends_the_run_which_then_goes_on(tmp_path: Path) -> None:
    bench = start(ENVIRONMENT, tmp_path, "run", *SMALL, *ALONE, "--arrival", "closed")
    line = kill_after(bench, "block 1 of 2", "engines.devices.emulated.process")
    assert "device" in line
    assert "DeviceLost" not in line  # a sentence, not a class

    (folder,) = (tmp_path / "results").iterdir()
    resume = ("run", "--resume", str(folder))
    bench = start(ENVIRONMENT, tmp_path, *resume)
    line = kill_after(bench, "first boots (discarded)", "engines.overlap.output_process")
    assert "output process" in line

    code, stdout, stderr = start(ENVIRONMENT, tmp_path, *resume, "--format", "json").end(90)
    assert code == 0, stderr
    assert "block 1 of 2" not in stderr  # it was kept
    (comparison,) = json.loads(stdout)["comparisons"]
    assert comparison["blocks"] == 2


def test_two_arms_answer_the_same_and_the_difference_between_them_is_explained(tmp_path: Path) -> None:
    asked = ("--variant", "async-output", "--blocks", "1", "--num-requests", "32", "--format", "json")
    code, stdout, stderr = start(ENVIRONMENT, tmp_path, "run", *SMALL, *asked).end(90)
    assert code == 0, stderr
    (comparison,) = json.loads(stdout)["comparisons"]
    assert comparison["outputs"]["identical"] == comparison["outputs"]["compared"] == 32
    assert comparison["prediction"]["model"] == "async_output"

    (folder,) = (tmp_path / "results").iterdir()
    code, stdout, stderr = start(ENVIRONMENT, tmp_path, "explain", str(folder), "--format", "json").end(30)
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found["prediction"] == comparison["prediction"]
    parts = dict(found["step_us"])
    whole = parts.pop("interval")
    for side in ("before", "after"):
        assert abs(sum(part[side] for part in parts.values()) - whole[side]) < 0.01
        assert parts["device"][side] > parts["unattributed"][side]
