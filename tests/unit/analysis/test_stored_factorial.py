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


def without_choice(found: dict[str, Any]) -> None:
    del next(iter(found["factorial"]["settings"].values()))["h2d"]


def without_setting(found: dict[str, Any]) -> None:
    found["factorial"]["settings"].popitem()


def without_effect(found: dict[str, Any]) -> None:
    del next(iter(found["factorial"]["metrics"].values()))["alone"]["h2d"]


def without_level(found: dict[str, Any]) -> None:
    next(iter(found["factorial"]["metrics"].values()))["settings"].popitem()


def without_primary(found: dict[str, Any]) -> None:
    del found["factorial"]["metrics"][found["comparisons"][0]["primary"]]


def without_comparison(found: dict[str, Any]) -> None:
    found["comparisons"].pop()


def without_a_comparisons_primary(found: dict[str, Any]) -> None:
    del found["comparisons"][1]["metrics"][found["comparisons"][1]["primary"]]


@pytest.mark.parametrize(
    "edit",
    [
        without_choice,
        without_setting,
        without_effect,
        without_level,
        without_primary,
        without_comparison,
        without_a_comparisons_primary,
    ],
)
def test_a_factorial_without_one_of_its_parts_is_refused(
    edit: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    found = read_summary(STORED)
    edit(found)
    write_json(tmp_path / SUMMARY_FILE, found)
    with pytest.raises(StoreError, match=r"summary\.json is damaged or was edited: "):
        summary(tmp_path, Result)


def test_as_it_was_stored_it_is_read() -> None:
    assert summary(STORED, Result).factorial is not None
