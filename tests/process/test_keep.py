"""A run of which blocks were left out still shows what it found, and says so where it can't."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import overlap_bench
from overlap_bench.harness.analysis import across_runs, explain
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.store.files import (
    StoreError,
)
from overlap_bench.harness.store.tables import write_table
from overlap_bench.harness.studies import gate
from tests.support import keep
from tests.support.in_process import bench
from tests.support.made_runs import stored

SOME = ("requests", "rounds")
FRAMES = ("requests", "steps", "rounds", "work", "divergences")
FORMS = ("table", "json", "csv", "markdown")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(stored(tmp_path, "a", 0.9))


def said(*words: str) -> list[str]:
    """What a command prints, in each form."""
    return [bench(*words, "--format", form).out for form in FORMS]


@pytest.mark.parametrize("tables", [(), SOME])
def test_the_numbers_stay_the_same(tables: tuple[str, ...], run: Path) -> None:
    before, printed = overlap_bench.load(run), said("compare", str(run))
    result = before.result
    keep.keep(run, tables)
    after = overlap_bench.load(run)
    assert said("compare", str(run)) == printed
    assert to_plain(after.result) == to_plain(result)
    pd.testing.assert_frame_equal(after.values, before.values, check_exact=True)
    for table in tables:
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table), check_exact=True)


def test_a_frame_that_was_left_out_is_not_taken_for_an_empty_one(run: Path) -> None:
    keep.keep(run, SOME)
    assert {each.name for each in run.rglob("*.parquet")} == {
        "requests.parquet",
        "rounds.parquet",
        "values.parquet",
    }
    loaded = overlap_bench.load(run)
    assert not len(loaded.divergences)  # the run had none
    with pytest.raises(StoreError, match="was stored without steps and work, which this needs"):
        _ = loaded.steps
    keep.keep(run)
    assert not (run / "blocks").exists()
    for table in FRAMES[:4]:
        with pytest.raises(StoreError, match="without requests, steps, rounds and work"):
            getattr(overlap_bench.load(run), table)


def test_what_needs_the_records_says_that_they_are_gone(run: Path, tmp_path: Path) -> None:
    other = stored(tmp_path, "b", 0.9)
    keep.keep(run, SOME)
    asked: list[Any] = [
        lambda: explain.explain(run),
        lambda: gate.judge(run, (), None),
        lambda: across_runs.compare([f"{run}:after", f"{run}:before"]),
        lambda: across_runs.compare([f"{run}:before", f"{other}:before"]),
        lambda: across_runs.compare([f"{other}:before", f"{run}:before"]),
    ]
    for ask in asked:
        with pytest.raises(
            StoreError, match="without steps and work, which this needs; bench compare and report"
        ):
            ask()


def test_it_is_finished_and_not_gone_on_with(run: Path) -> None:
    keep.keep(run)
    err = bench("run", "--resume", str(run), "--trust", code=2).err
    assert (
        "a is finished, and was stored without requests, steps, rounds and work; bench rerun measures" in err
    )


@pytest.mark.parametrize("change", ["another's", "twice", "gone", "gone from a metric"])
def test_values_that_are_not_one_of_each_arm_in_each_block_are_named(run: Path, change: str) -> None:
    keep.keep(run)
    path = run / "values.parquet"
    values = pd.read_parquet(path)
    first = (values["block"] == 0) & (values["arm"] == "before")
    values = {
        "another's": values.assign(arm=values["arm"].mask(first, "another")),
        "twice": pd.concat([values[first], values]),
        "gone": values[~first],
        "gone from a metric": values.drop(index=0),
    }[change]
    write_table(path, values)
    with pytest.raises(StoreError, match="does not have one value of each arm in each trial"):
        overlap_bench.load(run)
