"""Factorials: effects that were put in come out, what can't be told apart is said, and whole runs of them."""

import csv
import io
import json
from itertools import combinations, product
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap_bench
from overlap_bench.engines import api
from overlap_bench.engines.vllm import SPEC as VLLM
from overlap_bench.harness.analysis import comparison, decision, factorial
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import FactorialResult, Result
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.metrics.block import OFFERED
from overlap_bench.harness.metrics.definitions import PAIRS, SLICED, UNDISTURBED
from overlap_bench.harness.plan.factors import make_factorial
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.report import factorial_tables, formats, page
from overlap_bench.harness.stats import contrasts, paired
from overlap_bench.harness.store.manifest import Manifest, read_manifest
from overlap_bench.harness.studies import factorial as factorial_run
from tests.support.clockwork import CLOCKWORK, installed
from tests.support.in_process import ended
from tests.support.made_blocks import block, manifest, shown, side, stored_result, warned
from tests.support.made_runs import (
    TPOT,
    factorial_blocks,
    factorial_design,
    factorial_found,
    planned_factorial,
    stored,
)
from tests.support.refusals import refusal

sizes = st.floats(-0.3, 0.3)
DECIDED = {"primary": "tpot_ms_p50"}


def corners(count: int) -> contrasts.Floats:
    return np.array(list(product((-1.0, 1.0), repeat=count)))


def made(effects: dict[contrasts.Term, float], settings: contrasts.Floats) -> contrasts.Floats:
    """What the model of factorial.py gives, without noise; each block has a level of its own."""
    names = "abcde"[: settings.shape[1]]
    logs = sum(
        size / 2 * settings[:, [names.index(each) for each in term]].prod(axis=1)
        for term, size in effects.items()
    )
    return np.exp(np.arange(3)[:, None] + np.asarray(logs)[None, :])


# -- effects ----------------------------------------------------------------------------------------------


def test_of_two_settings_the_main_effect_is_the_paired_comparison() -> None:
    before, after = [4.0, 4.2, 3.9], [3.9, 4.0, 3.9]
    (only,) = contrasts.plan("a", corners(1)).contrasts
    found = contrasts.estimate(np.array([before, after]).T, only.weights)
    expected = paired.effect(before, after)
    assert (found.change, found.low, found.high, found.p) == pytest.approx(
        (expected.change, expected.low, expected.high, expected.p)
    )


@pytest.mark.parametrize(
    ("both", "noise", "verdict"),
    [
        (0.88, 0.001, "weaker together"),  # of 0.90 each: AB is +4.2%, and nothing got slower
        (0.75, 0.001, "stronger together"),
        (0.81, 0.001, "same together"),
        (0.81 * 1.015, 0.001, "weaker together"),  # half of it is within the margin of 1%, the whole is not
        (0.81, 0.1, "undecided"),
    ],
)
@pytest.mark.parametrize("metric", ["tpot_ms_p50", "throughput_tok_s"])
def test_an_interaction_is_judged_by_whether_gains_add_up(
    both: float, noise: float, verdict: str, metric: str
) -> None:
    values = np.array([1.0, 0.9, 0.9, both]) * np.exp(np.random.default_rng(1).normal(0, noise, (6, 4)))
    kind = definitions.METRICS[metric]
    values = values if kind.better == "lower" else 1 / values
    settings = np.array([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    *_, contrast = contrasts.plan("ab", settings).contrasts
    p = contrasts.estimate(values, contrast.weights).p
    assert contrast.term == ("a", "b")
    assert factorial.judge(contrast, values, 0.01, kind, p) == verdict


# -- settings that are left out ---------------------------------------------------------------------------


def test_three_of_four_settings_give_main_effects_without_the_interaction() -> None:
    plan = contrasts.plan("ab", corners(2)[:3])
    assert {each.term: each.assumes for each in plan.contrasts} == {
        ("a",): (("a", "b"),),
        ("b",): (("a", "b"),),
    }
    assert plan.aliased == {("a", "b"): (("a",), ("b",))}


@given(st.integers(2, 4), st.data())
def test_effects_that_were_put_in_come_out(count: int, data: st.DataObject) -> None:
    """Whatever is left out: an effect is what was put in, if the aliased ones are none."""
    names, every = "abcd"[:count], corners(count)
    places = st.integers(0, len(every) - 1)
    kept = data.draw(st.just({*range(len(every))}) | st.sets(places, min_size=1))
    settings, whole = every[sorted(kept)], len(kept) == len(every)
    plan = contrasts.plan(names, settings)
    told = {each.term for each in plan.contrasts}
    assert told.isdisjoint(plan.aliased)
    assert told | set(plan.aliased) == {
        each for size in range(count) for each in combinations(names, size + 1)
    }
    assert not (whole and plan.aliased)
    effects = {term: data.draw(sizes) for term in told} or {("a",): 0.0}
    values = made(effects, settings)
    for each in plan.contrasts:
        found = contrasts.estimate(values, each.weights)
        assert found.change == pytest.approx(np.expm1(effects[each.term]), abs=1e-7)
        assert found.sd == pytest.approx(0, abs=1e-7)  # what a trial's arms share, cancels
        assert not (whole and each.assumes)


# -- from toggles to arms ---------------------------------------------------------------------------------


def test_what_the_toggles_require_is_set() -> None:
    found = factorial_design("h2d,sync,output")
    assert [arm.name for arm in found.arms] == [
        "before", "h2d", "sync", "h2d+sync", "output", "h2d+output", "sync+output", "h2d+sync+output",
    ]  # fmt: skip
    assert {(arm.toggles["schedule"], arm.toggles["launch"]) for arm in found.arms} == {("overlap", "thread")}
    assert found.arms[-1].toggles | {"h2d": "pinned", "sync": "copy-done", "output": "process"} == (
        found.arms[-1].toggles
    )
    assert found.factorial.left_out == ()


def test_levels_can_be_named_and_the_rest_set() -> None:
    found = factorial_design("h2d=pinned:packed,tables", both=["graph=off", "max_context=256"])
    assert {arm.toggles["h2d"] for arm in found.arms} == {"pinned", "packed"}
    assert {arm.toggles["graph"] for arm in found.arms} == {"off"}
    assert {arm.options.max_context for arm in found.arms} == {256}
    assert {arm.toggles["schedule"] for arm in found.arms} == {"serial"}  # its first choice, as ever


def test_what_was_asked_for_stands_before_what_a_pace_brings_with_it() -> None:
    asked = Request(engine="vllm", both=("enforce_eager=on",), options={"pace": "10ms"}, design=DECIDED)
    found = make_factorial(asked, "async_scheduling,chunked_prefill", {"vllm": VLLM}, lambda: "emulated")
    assert {arm.toggles["enforce_eager"] for arm in found.arms} == {"on"}
    assert len({arm.toggles["chunked_prefill"] for arm in found.arms}) == 2


def test_toggles_that_are_not_varied_are_the_same_in_all_arms() -> None:
    """With overlap a thread launches by default, and a serial loop has none: it would count as overlap's."""
    for toggles in ("schedule,h2d,output", "schedule,h2d", "schedule,graph"):
        arms = factorial_design(toggles).arms
        varied = toggles.split(",")
        both = [{name: choice for name, choice in arm.toggles.items() if name not in varied} for arm in arms]
        shared = set.intersection(*(set(each) for each in both))
        assert {"launch", "d2h"} <= shared
        assert [each for each in shared if len({one[each] for one in both}) > 1] == []


def test_settings_that_mean_nothing_are_left_out_with_the_reason() -> None:
    found = factorial_design("schedule,output=inline:deferred,h2d")
    assert len(found.arms) == 6
    assert [each.name for each in found.factorial.left_out] == ["schedule+output", "schedule+output+h2d"]
    assert "output=deferred applies only with schedule=serial" in found.factorial.left_out[0].reason


@pytest.mark.parametrize(
    ("toggles", "message"),
    [
        ("h2d,sinc", "unknown toggle 'sinc'; did you mean sync?"),
        ("h2d", "--toggles takes 2 to 5 toggles, not 1; for one there is bench run"),
        ("h2d,sync,output,graph,tables,gc", "--toggles takes 2 to 5 toggles, not 6"),
        ("h2d,h2d", "--toggles names h2d twice"),
        ("h2d=pined:packed,sync", "unknown choice of h2d 'pined'; did you mean pinned?"),
        ("h2d=pinned,sync", "--toggles needs h2d=BEFORE:AFTER, not 'h2d=pinned'"),
        ("h2d=pinned:pinned,sync", "h2d needs two choices to vary, not pinned twice"),
        ("schedule,sync", "no valid setting has schedule=serial: launch=thread applies"),
        ("d2h,sync", "no valid setting has"),
        ("launch=inline:thread,gc,sync", "no valid setting has launch=inline"),
    ],
)
def test_toggles_that_make_no_design_are_refused(toggles: str, message: str) -> None:
    assert message in refusal(lambda: factorial_design(toggles))


def test_a_toggle_that_is_varied_is_not_set() -> None:
    with pytest.raises(api.BadSetting, match="h2d is varied: leave it out of --set"):
        factorial_design("h2d,output", both=["h2d=pinned"])
    with pytest.raises(api.BadSetting, match="unknown setting 'grap'"):
        factorial_design("h2d,output", both=["grap=off"])


# -- what is said -----------------------------------------------------------------------------------------


def words(result: Result) -> str:
    return " ".join(shown(result, 120).split())


def test_each_effect_alone_with_the_others_and_on_average() -> None:
    effects = factorial_found().factorial.metrics["tpot_ms_p50"]
    assert effects.alone["h2d"].change == pytest.approx(-0.05, abs=0.002)
    assert effects.with_others["h2d"].change == pytest.approx(-0.03, abs=0.002)
    assert effects.together.change == pytest.approx(0.9 * 0.97 - 1, abs=0.002)
    h2d, output, both = effects.effects
    assert h2d.change == pytest.approx((0.95 * 0.97) ** 0.5 - 1, abs=0.002)
    assert [row.verdict for row in (h2d, output, both)] == ["faster", "faster", "weaker together"]
    assert both.effect == ["h2d", "output"]
    assert both.ci_low < (0.97 / 0.95) ** 0.5 - 1 < both.ci_high
    assert both.p_adjusted >= both.p
    assert {row.verdict for row in effects.alone.values()} == {None}


def test_verdicts_are_adjusted_over_main_effects_and_pairs() -> None:
    rows = factorial_found().factorial.metrics["tpot_ms_p50"].effects
    adjusted = decision.holm({tuple(row.effect): row.p for row in rows})
    assert [row.p_adjusted for row in rows] == pytest.approx([*adjusted.values()])
    others = factorial_found().factorial.metrics["latency_ms_p50"].effects
    assert {row.verdict for row in others} == {None}
    plan = planned_factorial("h2d,output,gc", 2)
    tpot = {arm.name: 4.0 + number for number, arm in enumerate(plan.design.arms)}
    rows = comparison.result(plan, factorial_blocks(plan, tpot)).factorial.metrics["tpot_ms_p50"].effects
    assert [row.verdict is None for row in rows] == [False] * 6 + [True]


def test_a_factorial_as_it_is_printed() -> None:
    result = factorial_found()
    said = words(result)
    for part in (
        "On average over the settings of the others, tpot_ms_p50 changes by: h2d −4.0%",
        "by all together −12.", "h2d × output", "all, against none", "descriptive",
        "5% over all main effects and pairs together (Holm), margin ±1%", "emulated device",
        "Outputs: 216 of 216 requests have the tokens of the first setting.",
    ):  # fmt: skip
        assert part in said, part
    assert said.count("emulated device: a CPU core plays") == 1
    assert "| h2d × output |" in page.markdown_page(factorial_tables.page(result))
    lines = list(csv.DictReader(io.StringIO(factorial_tables.to_csv(result))))
    wheres = [line["where"] for line in lines if line["metric"] == "tpot_ms_p50"]
    assert wheres == ["alone"] * 2 + ["with_others"] * 2 + ["average"] * 3 + ["together"]
    top = {"headline": factorial_tables.conclusion(result), "verdict": None}
    assert json.loads(formats.to_json(result)) == to_plain(result) | top


def moved(blocks: int = 6, place: float = 0.0, drift: float = 0.0, plan: Manifest | None = None) -> str:
    """The warnings of a factorial in which running last, against first, and a block, against the one before,
    change TPOT by so much."""
    plan = plan or planned_factorial("h2d,output", blocks)
    random = np.random.default_rng(2)

    def at(number: int, arm: int, tpot_ms: float) -> float:
        ran = plan.drawn[number].index(arm) / (len(TPOT) - 1)
        return tpot_ms * float(np.exp(place * ran + drift * number + random.normal(0, 0.001)))

    found = [
        block(number, {name: side(at(number, arm, tpot)) for arm, (name, tpot) in enumerate(TPOT.items())})
        for number in range(blocks)
    ]
    return "\n".join(warned(comparison.result(plan, found).factorial))


def test_position_and_drift_are_checked() -> None:
    quiet = moved()
    for word in ("weaker", "drift", "permutation test", "same order"):
        assert word not in quiet
    told = moved(place=0.02)
    assert "position effect: running last makes an arm's time differ by +2." in told
    assert "it adds up to 0." in told
    assert "so the verdict is weaker than it looks" in moved(place=0.2)
    assert "drift: the times of all arms changed by +5." in moved(drift=0.01)
    one_order = msgspec.structs.replace(planned_factorial("h2d,output"), orders=[[0, 1, 2, 3]] * 6)
    assert "every trial ran its arms in the same order; if running early" in moved(plan=one_order)


def test_no_effect_is_judged_by_turns_that_are_not_believed() -> None:
    plan = planned_factorial("h2d,output", 7)
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, primary=SLICED))
    measured = [
        {
            arm: {SLICED: ms * (1 + 1e-3 * (number % 3)), UNDISTURBED: 1.0, PAIRS: 99}
            for arm, ms in TPOT.items()
        }
        for number in range(7)
    ]
    found = [block(number, {name: side(ms) for name, ms in TPOT.items()}) for number in range(7)]

    def judged(trials: int) -> FactorialResult:
        with_blocks = msgspec.structs.replace(plan.design, blocks=trials)
        of_trials = msgspec.structs.replace(plan, design=with_blocks)
        return comparison.result(of_trials, found[:trials], measured[:trials]).factorial

    believed = judged(7)
    assert believed.blocks == 7
    assert "undecided" not in {each.verdict for each in believed.metrics[SLICED].effects}
    measured[1]["h2d"][UNDISTURBED] = 0.05
    assert (judged(7).blocks, warned(judged(7))[0][:16]) == (6, "disturbed trials")
    assert {each.verdict for each in judged(6).metrics[SLICED].effects} == {"undecided"}
    assert any("other processes used the cores in 95% of" in line for line in warned(judged(6)))


def test_an_effect_that_one_block_hides_is_named() -> None:
    plan = planned_factorial("h2d,output", 8)
    found = []
    for number in range(8):
        far = 1.2 if number == 7 else 1.004 + 1e-4 * number  # of h2d; all in one direction
        tpot = {"before": 4.0, "h2d": 4.0 * far, "output": 3.6, "h2d+output": 3.6 * far}
        found.append(block(number, {name: side(each) for name, each in tpot.items()}))
    said = "\n".join(warned(comparison.result(plan, found).factorial))
    assert "disagrees with the t test on h2d (p = 0.008); the verdict stands" in said


def test_one_block_has_effects_and_no_verdict() -> None:
    plan = planned_factorial("h2d,output", 1)
    result = comparison.result(plan, factorial_blocks(plan, TPOT))
    row = result.factorial.metrics["tpot_ms_p50"].effects[0]
    assert row.change == pytest.approx(-0.04, abs=0.003)
    assert {row.ci_low, row.p, row.verdict} == {None}
    assert "no verdict" in factorial_tables.conclusion(result)
    assert "h2d" in words(result)


def test_what_is_left_out_and_what_it_costs_is_said() -> None:
    plan = planned_factorial("schedule,output=inline:deferred")
    tpot = {"before": 4.0, "schedule": 3.6, "output": 3.8}
    result = comparison.result(plan, factorial_blocks(plan, tpot))
    effects = result.factorial.metrics["tpot_ms_p50"]
    assert effects.with_others == {"schedule": None, "output": None}
    assert effects.together is None
    assert effects.effects[0].assumes == [["schedule", "output"]]
    said = words(result)
    for part in (
        "Left out", "output=deferred applies only with schedule=serial", "Can't be told apart",
        "schedule × output schedule, output", "schedule* ", "if the effects listed beside it below",
        "settings of the others, taking schedule × output as zero, tpot_ms_p50 changes by: schedule −",
    ):  # fmt: skip
        assert part in said, part
    assert "for none, tpot" not in words(factorial_found())


# -- whole runs -------------------------------------------------------------------------------------------


def test_a_factorial_from_boots_to_effects_and_again_from_disk(tmp_path: Path) -> None:
    environment = installed(tmp_path)
    few = (*CLOCKWORK, "--toggles", "pace,tokens", "--trials", "2", "--rounds", "1", "--format", "json")
    result = json.loads(ended(environment, tmp_path, "factorial", *few, code=1).out)  # tokens differ
    effects = {tuple(row["effect"]): row for row in result["factorial"]["metrics"]["tpot_ms_p50"]["effects"]}
    assert set(effects) == {("pace",), ("tokens",), ("pace", "tokens")}
    assert [each["outputs"]["identical"] for each in result["comparisons"]] == [16, 0, 0]
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name.split("-", 2)[2].startswith("factorial-pace-tokens-")
    assert stored_result(folder).items() <= result.items()
    assert len(read_manifest(folder).design.arms) == 4
    again = ("factorial", str(folder), "--format", "json")
    assert json.loads(ended(environment, tmp_path, *again, code=1).out) == result
    stdout = ended(environment, tmp_path, "factorial", "--resume", str(folder), code=1).out
    assert "OUTPUTS DIFFER in tokens, pace+tokens." in " ".join(stdout.split())


def test_another_run_is_no_factorial(tmp_path: Path) -> None:
    with pytest.raises(api.BadSetting, match="is not a factorial"):
        factorial_run.read(Path(stored(tmp_path, "a", plan=manifest(1))))


def test_the_effects_of_a_stored_factorial_as_a_frame(tmp_path: Path) -> None:
    plan = planned_factorial("h2d,output")
    run = overlap_bench.load(stored(tmp_path, "b", plan=plan, measured=factorial_blocks(plan, TPOT)))
    row = run.effects.query("metric == 'tpot_ms_p50' and effect == 'h2d' and where == 'average'").iloc[0]
    assert row["change"] == pytest.approx((0.95 * 0.97) ** 0.5 - 1, abs=0.002)
    assert row["verdict"] == "faster"
    with pytest.raises(api.BadSetting, match="is not a factorial, so it has no effects"):
        _ = overlap_bench.load(stored(tmp_path, "a", plan=manifest(1))).effects


def test_an_effect_on_the_load_that_is_offered_has_no_verdict() -> None:
    """An engine that keeps up gives what arrives, whatever the toggles are."""
    plan = planned_factorial("h2d,output")
    per_block = [
        {
            arm.name: {
                "throughput_tok_s": 1600.0 * (1 + 1e-4 * number),
                "throughput_req_s": 10.0,
                OFFERED: 10.0,
            }
            for arm in plan.design.arms
        }
        for number in range(6)
    ]
    design = msgspec.structs.replace(
        plan.design, primary="throughput_tok_s", secondaries=(),
        workload=msgspec.structs.replace(plan.design.workload, arrival="fixed", concurrency=None),
    )  # fmt: skip
    plan = msgspec.structs.replace(plan, design=design)
    found = factorial.of_run(plan, design.factorial, factorial_blocks(plan, TPOT), per_block, [])
    assert {each.verdict for each in found.metrics["throughput_tok_s"].effects} == {None}
