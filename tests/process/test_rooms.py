"""A run's folders outside of its results, when the run is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.common.temporary import room

HOLD = """
import sys, time
from harness.common.temporary import room
with room(sys.argv[1]) as made:
    print(made, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_and_what_is_in_use_stays(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    abandoned, used = (Path(each.stdout.readline().strip()) for each in holders if each.stdout)
    foreign = tmp_path / "bench-notes"
    foreign.mkdir()
    try:
        assert abandoned.is_dir()
        holders[0].kill()
        holders[0].wait()
        with room(str(tmp_path)) as made:
            assert set(tmp_path.iterdir()) == {used, made, foreign}
    finally:
        for each in holders:
            each.kill()
            each.communicate()
    assert set(tmp_path.iterdir()) == {used, foreign}
