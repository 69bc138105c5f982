"""Outputs that differ: where they part, and whether that is a near-tie or a fault."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.device_plan import configure
from overlap_bench.harness.analysis import across_runs, experiment_result, frames
from overlap_bench.harness.analysis.comparison import of_pair
from overlap_bench.harness.analysis.result import Outputs
from overlap_bench.harness.metrics import divergences
from overlap_bench.harness.plan.design import of_one_model
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run import teacher_forcing
from overlap_bench.harness.run.scoring import Answer, Client
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.store.tables import Block
from tests.support.in_process import ended
from tests.support.made_blocks import block, described, manifest, side, warned

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


@pytest.mark.parametrize("option", [{"model": "another"}, {"dtype": "bfloat16"}])
def test_outputs_of_another_model_or_dtype_are_not_held_against_the_first_ones(
    option: dict[str, str],
) -> None:
    first, second = DESIGN.arms
    other = msgspec.structs.replace(first.options, **option)
    arms = (first, msgspec.structs.replace(second, name="other", options=other), second)
    design = msgspec.structs.replace(DESIGN, arms=arms)
    assert of_one_model(design) == ["before", "after"]


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


LIMIT = 0.25


def judged(*gaps: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(gaps, columns=divergences.GAPS).assign(near_tie=LIMIT)


def test_of_three_arms_two_have_only_what_was_found_between_them() -> None:
    plan = manifest()
    first, second = plan.design.arms
    arms = (first, second, msgspec.structs.replace(second, name="third"))
    design = msgspec.structs.replace(plan.design, arms=arms)
    half = msgspec.structs.replace(described(), deterministic=False)
    descriptions = {arm.name: half for arm in arms}
    plan = msgspec.structs.replace(plan, design=design, descriptions=descriptions)
    parted = pd.DataFrame({"arm": ["after", "third"], "round": 0, "before": "before"})
    parted = parted.assign(before_gap=0.0, after_gap=[0.00001, 7.0], near_tie=LIMIT)
    made = block(0, {"before": side(4), "after": side(4, digest="x"), "third": side(4, digest="y")})
    read = Block(0, {**made.tables, "divergences": parted})

    def found(*pair: str) -> tuple[int | None, bool, bool]:
        compared = of_pair(plan, [read], *pair)
        said = " ".join(warned(compared))
        return compared.outputs.near_ties, "by the model of before" in said, "up to 7" in said

    assert found("before", "after") == found("after", "before") == (1, True, False)
    assert found("before", "third") == (0, True, True)
    assert found("after", "third") == (None, False, False)


def test_a_near_tie_is_one_where_both_tokens_are_as_likely_as_the_likeliest() -> None:
    table = judged((0, LIMIT / 2), (LIMIT / 2, LIMIT / 2), (0, 2 * LIMIT), (2 * LIMIT, 0), (0, math.inf))
    assert divergences.near_ties(table) == 2
    assert divergences.near_ties(judged((math.nan, math.nan), (0, 0))) is None
    assert divergences.near_ties(judged()) is None
    assert divergences.widest_gap([judged(), table]) == 2 * LIMIT
    assert divergences.widest_gap([judged((math.nan, math.nan))]) is None
    assert divergences.widest_gap([judged((math.inf, math.inf))]) == math.inf


APART = st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=30)


@given(APART, st.sampled_from(sorted(divergences.NEAR_TIE)), st.floats(0, 200))
def test_a_near_tie_is_as_wide_as_the_models_own_answers_are_apart_within_bounds(
    apart: list[float], dtype: str, largest: float
) -> None:
    least = divergences.near_tie(dtype, largest, [])
    assert least == pytest.approx(divergences.NEAR_TIE[dtype] * max(1, largest / divergences.USUAL))
    limit = divergences.near_tie(dtype, largest, apart)
    assert least <= limit <= max(least, divergences.MOST * divergences.NEAR_TIE[dtype])
    widest = max((abs(each) for each in apart if not math.isnan(each)), default=0.0)
    if widest < least / divergences.TIMES:
        assert limit == least
    assert limit == divergences.near_tie(dtype, largest, [-each for each in apart])


def test_a_few_answers_far_apart_widen_no_near_tie_and_a_model_that_rounds_more_has_wider_ones() -> None:
    rounding = [0.1, -0.1] * 9
    assert divergences.near_tie("bfloat16", 9, [*rounding, 9.0]) == pytest.approx(0.4)
    assert divergences.near_tie("bfloat16", 9, [2 * each for each in rounding]) == pytest.approx(0.8)
    assert divergences.near_tie("bfloat16", 9, [9.0] * 18) == 2.5


def test_where_every_output_that_differs_just_ends_the_run_says_that_such_fail_it() -> None:
    plan = manifest()
    half = msgspec.structs.replace(described(), deterministic=False)
    plan = msgspec.structs.replace(plan, descriptions={arm.name: half for arm in plan.design.arms})
    ended = judged((0, math.inf)).assign(arm="after", before="before")
    made = block(0, {"before": side(4), "after": side(4, digest="x")})
    compared = of_pair(plan, [Block(0, {**made.tables, "divergences": ended})], "before", "after")
    (line,) = (line for line in warned(compared) if "equal outputs are not promised" in line)
    assert "fails this run unless both tokens were about as likely" in line
    assert "inf" not in line


def test_where_equal_outputs_are_promised_and_differ_the_run_says_that_only_near_ties_do_not_fail_it() -> (
    None
):
    tie = judged((0, 0)).assign(arm="after", before="before")
    made = block(0, {"before": side(4), "after": side(4, digest="x")})
    tied = of_pair(manifest(), [Block(0, {**made.tables, "divergences": tie})], "before", "after")
    promise = "the engine promises equal tokens"
    assert any(promise in line for line in warned(tied))
    assert not any(promise in line for line in warned(of_pair(manifest(), [made], "before", "after")))


def test_an_experiment_has_near_ties_only_where_all_that_differ_were_judged() -> None:
    same = Outputs(compared=9, identical=9, near_ties=None)
    tie, unjudged = (Outputs(compared=9, identical=8, near_ties=ties) for ties in (1, None))
    assert experiment_result.sum_of([same, tie]).near_ties == 1
    assert experiment_result.sum_of([same, tie, unjudged]).near_ties is None


@pytest.mark.parametrize(
    ("identical", "near_ties", "promised", "fails"),
    [
        (10, None, True, False),
        (9, None, True, True),
        (9, 1, True, False),  # whatever was promised, rounding decides between equals
        (8, 1, True, True),
        (9, None, False, False),  # nobody could tell
        (9, 1, False, False),
        (8, 1, False, True),
    ],
)
def test_outputs_that_differ_fail_a_run_where_they_were_promised_or_no_tie_explains_it(
    identical: int, near_ties: int | None, promised: bool, fails: bool
) -> None:
    outputs = Outputs(compared=10, identical=identical, near_ties=near_ties)
    assert outputs.fail(promised) is fails


class Answering:
    """An engine that gives each token these scores."""

    def __init__(self, *scores: api.Score) -> None:
        self.scores = list(scores)

    def ask(self, requests: Sequence[api.Request]) -> list[Answer]:
        finish = api.Finish(0, "length", 1, 1, 0, 0, 0, self.scores)
        return [Answer("", (1,), finish) for _ in requests]


def test_a_model_that_computes_no_numbers_makes_no_near_tie_and_an_engine_without_scores_is_named() -> None:
    asked = ((1, 2), 3)
    client = cast("Client", Answering(api.Score(math.nan, True)))
    assert teacher_forcing.gaps(client, {asked}) == {asked: math.inf}
    with pytest.raises(api.EngineError, match="gives no scores"):
        teacher_forcing.gaps(cast("Client", Answering()), {asked})


class Decoding:
    """An engine that gives a token one logit behind a prompt, and 0.5 more behind what it decoded itself."""

    def __init__(self) -> None:
        self.asked: list[api.Request] = []

    def ask(self, requests: Sequence[api.Request]) -> list[Answer]:
        self.asked += requests
        return [self._answer(each) for each in requests]

    def _answer(self, request: api.Request) -> Answer:
        assert request.max_new_tokens == len(request.forced)
        own = 0.5 * (len(request.forced) > 1 and request.forced[-1] == 7)
        scores = [api.Score(own - 3, False) for _ in request.forced]
        return Answer("", (), api.Finish(0, "length", 1, 1, 0, 0, 0, scores))


@given(st.lists(st.integers(0, 200), max_size=300))
def test_answers_are_compared_behind_a_prompt_and_behind_decoded_tokens(lengths: list[int]) -> None:
    partings = [teacher_forcing.Parting((1, 2), tuple(range(length)), (7, 8)) for length in lengths]
    client = Decoding()
    apart = teacher_forcing.apart(cast("Client", client), partings)
    assert all(each == -0.5 for each in apart)
    possible = sum(lengths)
    assert min(possible, 1) <= len(apart) <= min(possible, 2 * teacher_forcing.PLACES)
    contexts = {each.context for each in partings}
    for request in client.asked:
        behind = (*request.prompt, *request.forced[:-1])
        assert any(context[: len(behind)] == behind for context in contexts)


def test_the_engine_that_judges_captures_few_programs() -> None:
    arm = DESIGN.arms[0]
    large = msgspec.structs.replace(arm.options, max_batch_size=1024, max_context=192)
    options = teacher_forcing.to_judge(msgspec.structs.replace(arm, options=large), SPEC).options
    assert (options.scoring, options.max_batch_size) == (True, teacher_forcing.BATCH)
    alone = msgspec.structs.replace(arm.options, max_batch_size=1)
    alone = teacher_forcing.to_judge(msgspec.structs.replace(arm, options=alone), SPEC)
    assert alone.options.max_batch_size == 1


@pytest.mark.parametrize("variant", ["speculation", "overlap-speculation", "multi-step"])
def test_the_engine_that_judges_gives_one_token_a_step_as_it_must_to_be_told_what_to_score(
    variant: str,
) -> None:
    """Else it would not boot, and tokens that differ would be judged by nobody."""
    toggles = load_variants()[variant].after
    arm = msgspec.structs.replace(DESIGN.arms[0], engine="overlap", toggles=SPEC.check(toggles))
    judging = teacher_forcing.to_judge(arm, SPEC)
    assert configure(arm.options, arm.toggles).gives > 1
    assert configure(judging.options, judging.toggles).gives == 1


# -- real engines -------------------------------------------------------------------------------------------

RUN = (
    *("run", "--engine", "overlap", "--trials", "1", "--rounds", "1", "--arrival", "burst"),
    *("--prompts", "english", "--input-tokens", "uniform:20:100"),
    *("--interleaved-rounds", "0", "--set", "max_context=192", "--format", "json"),
)


def bench(where: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    code, stdout, stderr = ended(os.environ, where, *arguments, "--out", "results", code=None)
    return code, json.loads(stdout or "{}"), stderr


def only_run(where: Path) -> Path:
    (folder,) = (where / "results").glob("*-*")
    return folder


def test_another_model_is_no_near_tie_and_what_was_not_judged_can_be_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--no-pretok", "--before", "seed=0", "--after", "seed=1")
    load = ("--num-requests", "4", "--max-new-tokens", "8")
    code, result, stderr = bench(tmp_path, *RUN, *settings, *load)
    assert code == 1, stderr
    assert result["comparisons"][0]["outputs"] == {
        "compared": 4,
        "identical": 0,
        "near_ties": 0,
        "distinct": 4,
    }

    folder = only_run(tmp_path)
    turned = across_runs.compare([f"{folder}:after", f"{folder}:before"])
    assert turned.result.comparisons[0].outputs.near_ties == 0
    assert turned.outputs_differ
    assert set(overlap_bench.load(folder).divergences) <= set(frames.COLUMNS["divergences"])
    first = tables.read_table(folder, 0, "divergences")
    own = first["before_gap"]  # the likeliest tokens are its own: the text became the ids that it answered
    assert (own < divergences.NEAR_TIE["float32"]).all()
    unjudged = first.assign(before_gap=np.nan, after_gap=np.nan)
    unjudged.loc[0, "after_token"] = 1 << 40  # what no model says
    tables.write_table(tables.table_path(folder, 0, "divergences"), unjudged)
    stored = read_manifest(folder)
    # What an engine of a git ref said of its files holds no longer: the worktree is gone.
    old = stored.descriptions["before"]
    old = msgspec.structs.replace(old, model=old.model | {"tokenizer": str(tmp_path / "gone")})
    stored = msgspec.structs.replace(stored, descriptions=stored.descriptions | {"before": old})
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(teacher_forcing, "apart", lambda client, partings: [2e-4])
    monkeypatch.setattr(divergences, "near_tie", lambda *given: asked.append(given) or 8e-4)
    measured = [Block(0, tables.read_block(folder, 0))]
    (judged_block,) = teacher_forcing.judge(folder, stored, measured, print)
    again = tables.read_table(folder, 0, "divergences")
    assert asked == [("float32", float(old.model["largest_logit"]), [2e-4])]
    assert again["near_tie"].tolist() == [8e-4] * 4
    np.testing.assert_allclose(again["after_gap"][1:], first["after_gap"][1:], atol=1e-3)
    assert again["after_gap"][0] == math.inf
    assert judged_block.tables["divergences"]["after_gap"].tolist() == again["after_gap"].tolist()

    # An engine that can't be booted any more costs the run nothing but the answer.
    tables.write_table(tables.table_path(folder, 0, "divergences"), unjudged)
    before, after = stored.design.arms
    gone = msgspec.structs.replace(before, python=str(tmp_path / "gone"))
    design = msgspec.structs.replace(stored.design, arms=(gone, after))
    said: list[str] = []
    stored = msgspec.structs.replace(stored, design=design)
    assert teacher_forcing.judge(folder, stored, measured, said.append) == measured
    assert "not judged" in said[-1]
    assert "gone" in said[-1]
    assert tables.read_table(folder, 0, "divergences")["after_gap"].isna().all()
