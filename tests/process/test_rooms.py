"""A run's folders outside of its results, when the run is killed."""

import subprocess
import sys
from errno import ENOLCK
from pathlib import Path
from typing import NoReturn

import pytest

from overlap_bench.harness.common import processes
from overlap_bench.harness.common.processes import room

HOLD = """
import sys, time
from overlap_bench.harness.common.processes import OURS, room
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


def test_where_locks_fail_a_folder_is_nobody_elses_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(ENOLCK, "No locks available")

    with monkeypatch.context() as without:
        without.setattr(processes.fcntl, "flock", fail)
        with room(str(tmp_path)) as made, room(str(tmp_path)) as other:
            assert made.is_dir()
            without.undo()
            with room(str(tmp_path)):  # made where locks work again
                assert made.is_dir()
                assert other.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_removal_that_was_killed_half_way_is_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        with room(str(tmp_path)) as made:
            (made / "a").write_text("")
            (made / "tree").mkdir()
            killed.setattr(processes.shutil, "rmtree", lambda *_, **__: None)
        assert made.is_dir()
    with room(str(tmp_path)) as other:
        assert set(tmp_path.iterdir()) == {other}
