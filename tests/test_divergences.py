"""Outputs that differ: where they part, and whether that is a near-tie or a fault."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from harness import divergences, store, stored_run, teacher_forcing
from tests.bench_command import BENCH
from tests.made_blocks import manifest

DESIGN = manifest().design
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def requests(**outputs: list[list[int]]) -> pd.DataFrame:
    """One round: by arm, the tokens of each request."""
    rows = [
        (arm, 0, request, np.array(tokens, dtype=np.int64), str(tokens), "")
        for arm, lists in outputs.items()
        for request, tokens in enumerate(lists)
    ]
    return pd.DataFrame(rows, columns=["arm", "round", "request", "token_ids", "digest", "error"])


@given(TOKENS, TOKENS)
def test_outputs_part_at_the_first_token_that_differs(before: list[int], after: list[int]) -> None:
    found = divergences.find(requests(before=[before], after=[after]), ["before", "after"])
    assert len(found) == (before != after)
    for _, row in found.iterrows():
        agreed = list(row["agreed"])
        assert before[: len(agreed)] == after[: len(agreed)] == agreed
        said = [tokens[len(agreed) :][:1] or [divergences.ENDED] for tokens in (before, after)]
        assert said == [[row["before_token"]], [row["after_token"]]]
        assert row["before_token"] != row["after_token"]
        assert math.isnan(row["before_gap"])
        assert math.isnan(row["after_gap"])


def test_every_later_arm_is_held_against_the_first() -> None:
    table = requests(a=[[1], [2]], b=[[1], [3]], c=[[4], [2]])
    found = divergences.find(table, ["a", "b", "c"])
    assert found[["arm", "request", "before"]].to_numpy().tolist() == [["b", 1, "a"], ["c", 0, "a"]]


def test_a_request_that_failed_or_whose_output_is_text_has_no_divergence() -> None:
    table = requests(before=[[1], []], after=[[2], []])
    table["digest"] = ["x", "y", "z", "u"]  # the second's are of texts
    table.loc[2, "error"] = "out of memory"
    assert not len(divergences.find(table, ["before", "after"]))


def judged(*gaps: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(gaps, columns=["before_gap", "after_gap"])


def test_a_near_tie_is_one_where_both_tokens_are_as_likely_as_the_likeliest() -> None:
    limit = divergences.NEAR_TIE["float32"]
    table = judged((0, limit / 2), (limit / 2, limit / 2), (0, 2 * limit), (2 * limit, 0), (0, math.inf))
    assert divergences.near_ties(DESIGN, table) == 2
    assert divergences.near_ties(DESIGN, judged((math.nan, math.nan))) is None
    assert divergences.widest_gap([judged(), table]) == 2 * limit
    assert divergences.widest_gap([judged((math.nan, math.nan))]) is None


@pytest.mark.parametrize(
    ("identical", "near_ties", "promised", "fails"),
    [
        (10, None, True, False),
        (9, None, True, True),
        (9, 1, True, True),  # a promise is broken by a tie too
        (9, None, False, False),  # nobody could tell
        (9, 1, False, False),
        (8, 1, False, True),
    ],
)
def test_outputs_that_differ_fail_a_run_where_they_were_promised_or_no_tie_explains_it(
    identical: int, near_ties: int | None, promised: bool, fails: bool
) -> None:
    outputs = {"compared": 10, "identical": identical, "near_ties": near_ties}
    assert divergences.fails(outputs, promised) is fails


def test_the_engine_that_judges_captures_few_programs() -> None:
    arm = DESIGN.arms[0]
    large = msgspec.structs.replace(arm.options, max_batch_size=1024, max_context=192)
    options = teacher_forcing.asked(msgspec.structs.replace(arm, options=large)).options
    assert (options.scoring, options.max_batch_size) == (True, teacher_forcing.BATCH)
    alone = msgspec.structs.replace(arm.options, max_batch_size=1)
    assert teacher_forcing.asked(msgspec.structs.replace(arm, options=alone)).options.max_batch_size == 1


# -- real engines -------------------------------------------------------------------------------------------

RUN = (
    *("run", "--engine", "overlap", "--blocks", "1", "--rounds", "1", "--arrival", "burst"),
    *("--prompts", "english", "--input-tokens", "uniform:20:100", "--format", "json"),
)


def bench(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def only_run(where: Path) -> Path:
    (folder,) = where.glob("*-*")
    return folder


def test_in_half_precision_another_batch_turns_near_ties_and_that_fails_no_run(tmp_path: Path) -> None:
    settings = ("--dtype", "bfloat16", "--before", "max_batch_size=1", "--after", "max_batch_size=8")
    load = ("--num-requests", "12", "--max-new-tokens", "32")
    code, result, stderr = bench(*RUN, *settings, *load, "--out", str(tmp_path))
    assert code == 0, stderr
    (comparison,) = result["comparisons"]
    outputs = comparison["outputs"]
    if outputs["identical"] == outputs["compared"] == 12:
        pytest.skip("on this processor no output differs")
    assert outputs["near_ties"] == outputs["compared"] - outputs["identical"]
    assert any("no near-tie explains it" in line for line in comparison["warnings"])
    table = harness.load(only_run(tmp_path)).divergences
    assert set(table) <= set(stored_run.COLUMNS["divergences"])
    assert (table[["before_gap", "after_gap"]].max(axis=1) < divergences.NEAR_TIE["bfloat16"]).all()


def test_another_model_is_no_near_tie_and_what_was_not_judged_can_be_later(tmp_path: Path) -> None:
    settings = ("--no-pretok", "--before", "seed=0", "--after", "seed=1")
    load = ("--num-requests", "4", "--max-new-tokens", "8")
    code, result, stderr = bench(*RUN, *settings, *load, "--out", str(tmp_path))
    assert code == 1, stderr
    assert result["comparisons"][0]["outputs"] == {"compared": 4, "identical": 0, "near_ties": 0}

    folder = only_run(tmp_path)
    first = store.read_table(folder, 0, "divergences")
    own = first["before_gap"]  # the likeliest tokens are its own: the text became the ids that it answered
    assert (own < divergences.NEAR_TIE["float32"]).all()
    unjudged = first.assign(before_gap=np.nan, after_gap=np.nan)
    store.write_table(store.table_path(folder, 0, "divergences"), unjudged)
    stored = store.read_manifest(folder)
    teacher_forcing.judge(folder, stored, print)
    again = store.read_table(folder, 0, "divergences")
    np.testing.assert_allclose(again["after_gap"], first["after_gap"], atol=1e-3)

    # An engine that can't be booted any more costs the run nothing but the answer.
    store.write_table(store.table_path(folder, 0, "divergences"), unjudged)
    before, after = stored.design.arms
    gone = msgspec.structs.replace(
        before, options=msgspec.structs.replace(before.options, model=str(tmp_path / "gone"))
    )
    design = msgspec.structs.replace(stored.design, arms=(gone, after))
    said: list[str] = []
    teacher_forcing.judge(folder, msgspec.structs.replace(stored, design=design), said.append)
    assert "not judged" in said[-1]
    assert "gone" in said[-1]
    assert store.read_table(folder, 0, "divergences")["after_gap"].isna().all()
