"""`bench run` on the overlap engine itself: what is kept when one of its own processes is killed, and what
two arms of it give."""

import json
import os
import signal
from pathlib import Path

from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import read_manifest
from tests.support.bench_command import Bench, last_line, start, wait_until_serving
from tests.support.in_process import done
from tests.support.places import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/support/a_project:{ROOT}", "COLUMNS": "120"}
SMALL = ("--device", "emulated", "--rounds", "1", "--max-new-tokens", "64", "--concurrency", "8")
# One arm, which boots in half the time; long rounds, so that the process dies inside one.
ALONE = ("--engine", "overlap", "--set", "output=process", "--trials", "2", "--num-requests", "64")


def kill(bench: Bench, word: str) -> str:
    """Kill the process with `word` in its command, in a round; the run's last line."""
    victim = bench.find(word)
    wait_until_serving(victim)
    victim.send_signal(signal.SIGKILL)
    code, _, stderr = bench.end()
    assert code == 4, stderr
    assert not bench.left()
    line = last_line(stderr)
    assert line.startswith("bench: the ")
    assert f"(pid {victim.pid})" in line
    assert "--resume" in line
    return line


def test_a_killed_device_or_output_process_ends_the_run_which_then_goes_on(tmp_path: Path) -> None:
    """How it goes on to its end is tests/process/test_runner.py's: the boots of this engine are dear."""
    bench = start(ENVIRONMENT, tmp_path, "run", *SMALL, *ALONE, "--arrival", "closed")
    bench.wait_for("trial 1 of 2 done")
    line = kill(bench, "overlap_bench.engines.devices.emulated.process")
    assert "device" in line
    assert "DeviceLost" not in line  # a sentence, not a class

    (folder,) = (tmp_path / "results").iterdir()
    assert tables.finished_blocks(folder) == [0]
    bench = start(ENVIRONMENT, tmp_path, "run", "--resume", str(folder))
    line = kill(bench, "overlap_bench.engines.overlap.output_process")
    assert "output process" in line
    assert tables.finished_blocks(folder) == [0]


def test_two_arms_answer_the_same_and_the_difference_between_them_is_explained(tmp_path: Path) -> None:
    asked = (
        "--variant",
        "async-output",
        "--trials",
        "1",
        "--interleaved-rounds",
        "2",
        "--num-requests",
        "32",
    )
    stdout = done(ENVIRONMENT, tmp_path, "run", *SMALL, *asked, "--format", "json")
    (comparison,) = json.loads(stdout)["comparisons"]
    assert comparison["outputs"]["identical"] == comparison["outputs"]["compared"] == 32
    assert comparison["prediction"]["model"] == "async_output"

    (folder,) = (tmp_path / "results").iterdir()
    assert [each.model["tokenizer"] for each in read_manifest(folder).descriptions.values()] == [
        "engines.presets/tokenizer.json",
        "engines.presets/tokenizer.json",
    ]
    stdout = done(ENVIRONMENT, tmp_path, "explain", str(folder), "--format", "json")
    found = json.loads(stdout)
    assert found["prediction"] == comparison["prediction"]
    parts = dict(found["step_us"])
    whole = parts.pop("interval")
    for side in ("before", "after"):
        assert abs(sum(part[side] for part in parts.values()) - whole[side]) < 0.01
        assert parts["device"][side] > parts["unattributed"][side]
