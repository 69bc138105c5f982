"""Points of a sweep that are measured at once, where one of them fails."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overlap_bench.engines.api import EngineError
from overlap_bench.harness.run.forecast import NoTime
from overlap_bench.harness.studies import sweep

POINTS = [SimpleNamespace(at={"concurrency": str(number)}, design=number) for number in range(5)]


def test_points_that_were_not_begun_are_not_counted_as_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_steps(design: int, *_: Any) -> Iterator[None]:
        if design == 2:
            raise EngineError("the cluster is gone")
        yield

    monkeypatch.setattr(sweep, "run_of", lambda design, *_, **__: design)
    monkeypatch.setattr(sweep.measure_, "in_steps", in_steps)
    monkeypatch.setattr(sweep, "_kept", lambda folder: True)
    cluster = sweep.Cluster(cast(Any, lambda: nullcontext(None)), cast(Any, str))
    planned, admit = SimpleNamespace(points=POINTS), cast(Any, None)
    with pytest.raises(EngineError) as failed:
        sweep._at_once(tmp_path, cast(Any, planned), lambda line: None, admit, cluster, made_here=True)
    assert failed.value.__notes__ == [
        f"0 of 5 points are done, go on with --resume {tmp_path}",
        "it failed at concurrency=2",
    ]


def test_a_point_without_time_for_a_verdict_is_left_out_and_the_first_one_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done, said = list[int](), list[str]()

    def of_point(design: int, *_: Any) -> None:
        if design in short:
            raise NoTime("1 trial fits into 3 minutes")
        done.append(design)

    monkeypatch.setattr(sweep, "run_of", lambda design, *_, **__: design)
    monkeypatch.setattr(sweep.measure_, "measure", of_point)
    monkeypatch.setattr(sweep.sweep, "run_of", lambda point, runs: None)
    monkeypatch.setattr(sweep, "_kept", lambda folder: bool(done))
    planned, display = SimpleNamespace(points=POINTS), cast(Any, None)
    short = {1, 3}
    sweep._one_by_one(tmp_path, cast(Any, planned), said.append, display, cast(Any, None), made_here=True)
    assert done == [0, 2, 4]
    assert "concurrency=3 is left out: 1 trial fits into 3 minutes" in said
    done.clear()
    short = {0}
    with pytest.raises(NoTime):
        sweep._one_by_one(tmp_path, cast(Any, planned), said.append, display, cast(Any, None), made_here=True)
    assert not done
