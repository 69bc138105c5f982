"""A stored factorial whose parts do not fit each other is named, not believed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.stored import summary
from overlap_bench.harness.store.files import SUMMARY_FILE, StoreError, read_summary, write_json
from tests.support.places import REFERENCE

STORED = REFERENCE / "experiments" / "factorial-schedule-h2d-output"


PRIMARY = "tpot_ms_p50"


@pytest.mark.parametrize(
    "edit",
    [
        lambda found: found["factorial"]["settings"]["before"].pop("h2d"),
        lambda found: found["factorial"]["settings"].popitem(),
        lambda found: found["factorial"]["metrics"][PRIMARY]["alone"].pop("h2d"),
        lambda found: found["factorial"]["metrics"][PRIMARY]["settings"].popitem(),
        lambda found: found["factorial"]["metrics"].pop(PRIMARY),
        lambda found: found["comparisons"].pop(),
        lambda found: found["comparisons"][1]["metrics"].pop(PRIMARY),
    ],
    ids=["choice", "setting", "effect", "level", "primary", "comparison", "comparison's primary"],
)
def test_a_factorial_without_one_of_its_parts_is_refused(
    edit: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    found = read_summary(STORED)
    edit(found)
    write_json(tmp_path / SUMMARY_FILE, found)
    with pytest.raises(StoreError, match=r"summary\.json is damaged or was edited: "):
        summary(tmp_path, Result)


def test_as_it_was_stored_it_is_read() -> None:
    assert summary(STORED, Result).factorial is not None
