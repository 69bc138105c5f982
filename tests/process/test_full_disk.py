"""Results that can't be written: a place that can't be had is bad usage, a full disk is a failed run."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.cli.progress import on_stderr
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.files import WriteFailed, append_step_summary, write_json, write_text
from overlap_bench.harness.studies import sweep
from tests.support.clockwork import CLOCKWORK, installed
from tests.support.in_process import done, refused
from tests.support.made_blocks import blocks
from tests.support.made_runs import stored_sweep

FULL = 64  # bytes that still fit into a file: as on a full disk a write fails, and every folder can be made
TOO_LARGE = "File too large"  # what the system says of it


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_is_no_fault_of_what_was_asked(tmp_path: Path) -> None:
    content = "x" * 2 * FULL
    table = blocks(1.0, 1)[0].tables["requests"]
    with full_disk():
        for write in (
            lambda: write_text(tmp_path / "a", content),
            lambda: append_step_summary(content, {"GITHUB_STEP_SUMMARY": str(tmp_path / "a")}),
            lambda: write_json(tmp_path / "a", {"a": content}),
            lambda: tables.write_table(tmp_path / "a", table),
            lambda: tables.write_block(tmp_path, 0, blocks(1.0, 1)[0].tables),
        ):
            with pytest.raises(WriteFailed, match=f"can't write .*{TOO_LARGE}") as failed:
                write()
            assert not isinstance(failed.value, api.BadSetting)


def test_a_run_whose_summary_does_not_fit_has_failed_and_can_go_on(tmp_path: Path) -> None:
    environment = installed(tmp_path)
    done(environment, tmp_path, "run", *CLOCKWORK, "--trials", "1")
    (folder,) = (tmp_path / "results").iterdir()
    summary = folder / "summary.json"
    whole = summary.read_text()
    summary.unlink()
    again = ("run", "--resume", f"results/{folder.name}")
    with full_disk():
        said = refused(environment, tmp_path, *again, code=4)
    assert said == (
        f"bench: can't write results/{folder.name}/summary.json: {TOO_LARGE}; 1 of 1 trials are kept, go on "
        f"with bench run --resume results/{folder.name}"
    )
    done(environment, tmp_path, *again)
    assert summary.read_text() == whole


def test_a_sweep_with_no_room_for_its_next_point_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored_sweep(tmp_path / "a-sweep")
    monkeypatch.setattr(sweep.sweep, "check_resume", lambda stored, now: None)

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as now:
        now.setattr(Path, "mkdir", full)
        with pytest.raises(WriteFailed, match=r"can't write results to .*a-sweep: No space") as failed:
            sweep.measure(Request(), (), folder, tmp_path, lambda line: None, lambda *_: True, on_stderr)
    assert failed.value.__notes__ == [f"2 of 3 points are done, go on with --resume {folder}"]
