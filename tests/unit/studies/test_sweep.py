"""Points of a sweep that are measured at once, where one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.api import EngineError
from harness.studies import sweep

POINTS = [SimpleNamespace(at={"concurrency": str(number)}, design=number) for number in range(5)]


def test_points_that_were_not_begun_are_not_counted_as_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def in_steps(design: int, *_: Any) -> Iterator[None]:
        if design == 2:
            raise EngineError("the cluster is gone")
        yield

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
