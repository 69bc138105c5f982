"""What a gate can hold on a machine, from equal arms."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from overlap_bench.harness.analysis import comparison, gate_plans
from overlap_bench.harness.analysis.gate_plans import GatePlans
from overlap_bench.harness.analysis.verdict_warnings import Contradicted, TurnsNotBelieved
from overlap_bench.harness.metrics.definitions import SLICED
from overlap_bench.harness.plan.request import Request
from overlap_bench.harness.report import formats, gate_plan_tables
from overlap_bench.harness.stats import planning
from overlap_bench.harness.store.files import read_json
from tests.support.made_blocks import blocks, manifest


def plans(minutes: float | None = None, metrics: Sequence[str] = (), limit: float | None = None) -> GatePlans:
    """Plans from six trials of equal arms in 70 s: ten seconds each, and as much for the discarded boots."""
    found = comparison.result(manifest(), blocks(1.0, 6))
    return gate_plans.of_equal_arms(found, 70.0, minutes, metrics, limit)


def test_a_plan_passes_an_unchanged_head_in_four_of_five_runs_even_where_the_sd_is_as_high_as_may_be() -> (
    None
):
    found = plans()
    (sd,) = {found.sd[plan.metric] for plan in found.plans if plan.metric == "tpot_ms_p50"}
    for plan in (plan for plan in found.plans if plan.metric == "tpot_ms_p50" and plan.blocks > 3):
        target = plan.limit / planning.highest_sd(sd, 6)
        assert planning.detection_power(target, plan.blocks, alpha=0.1) >= 0.79
        assert planning.detection_power(target, plan.blocks - 1, alpha=0.1) < 0.81


def test_a_tighter_limit_takes_longer_and_minutes_count_the_boots_that_are_thrown_away() -> None:
    found = [plan for plan in plans().plans if plan.metric == "tpot_ms_p50"]
    assert [plan.blocks for plan in found] == sorted((plan.blocks for plan in found), reverse=True)
    assert all(plan.minutes == pytest.approx((plan.blocks + 1) * 10 / 60) for plan in found)


def test_a_trial_that_was_left_out_took_its_time_all_the_same() -> None:
    found = comparison.result(manifest(), blocks(1.0, 6))
    fewer = msgspec.structs.replace(found.comparisons[0], blocks=5, left_out=[2])
    of_five = msgspec.structs.replace(found, comparisons=[fewer])
    plan = gate_plans.of_equal_arms(of_five, 70.0, None, (), None)
    assert (plan.blocks, plan.seconds_per_block) == (5, 10.0)


def test_the_smallest_limit_within_the_minutes_is_recommended_and_none_where_none_fits() -> None:
    found = plans(minutes=2.0)
    assert found.recommended.minutes <= 2.0
    assert not [plan for plan in found.plans if plan.minutes <= 2.0 and plan.limit < found.recommended.limit]
    assert plans(minutes=0.1).recommended is None
    assert "No limit that was tried can be held" in gate_plan_tables.conclusion(plans(minutes=0.1))


def test_what_a_gate_is_wanted_for_is_all_that_is_planned() -> None:
    found = plans(metrics=("ttft_ms_p50",), limit=0.03)
    assert {(plan.metric, plan.limit) for plan in found.plans} <= {("ttft_ms_p50", 0.03)}
    assert set(found.sd) == {"ttft_ms_p50"}


def test_the_offered_load_is_never_recommended() -> None:
    """It is steady, and says nothing of the engine: a gate on it is never decided."""
    found = comparison.result(manifest(), blocks(1.0, 6))
    both = ("throughput_tok_s", "tpot_ms_p50")
    offered = gate_plans.of_equal_arms(found, 70.0, None, both, None, offered=("throughput_tok_s",))
    assert set(offered.sd) == {"tpot_ms_p50"}


def test_turns_that_are_not_believed_are_told_of() -> None:
    """A gate on them would stay undecided for as long as what disturbs them goes on."""
    found = comparison.result(manifest(), blocks(1.0, 6))
    for told in (Contradicted("disturbed"), TurnsNotBelieved((SLICED,), "disturbed")):
        equal = msgspec.structs.replace(found.comparisons[0], warnings=[told])
        doubted = msgspec.structs.replace(found, comparisons=[equal])
        said = gate_plans.of_equal_arms(doubted, 70.0, None, (), None)
        assert said.doubt == "disturbed"
        (warned,) = gate_plan_tables.page(said).warnings
        assert warned.startswith("turns of this calibration are not believed")
        assert warned.endswith("disturbed; calibrate anew on a quieter machine")
    assert not gate_plan_tables.page(plans()).warnings


# -- a gate by a plan -------------------------------------------------------------------------------------


def test_a_gate_as_recommended_has_its_metric_limit_blocks_and_minutes() -> None:
    found = plans(minutes=2.0)
    request, names, limit = gate_plans.applied(found, Request(engine="e"), (), None)
    plan = found.recommended
    assert (names, limit) == ((plan.metric,), plan.limit)
    assert request.design == {"blocks": plan.blocks, "max_minutes": 2.0}


def test_what_was_asked_for_goes_before_what_is_recommended() -> None:
    found = plans(minutes=2.0)
    asked = Request(engine="e", design={"blocks": 4, "max_minutes": 1.0})
    request, names, limit = gate_plans.applied(found, asked, ("ttft_ms_p50",), 0.03)
    assert (request.design, names, limit) == (asked.design, ("ttft_ms_p50",), 0.03)
    sequential = gate_plans.applied(found, Request(engine="e", until_decided=True), (), None)[0]
    assert sequential.design == {"max_minutes": 2.0}


def test_where_nothing_can_be_recommended_a_gate_is_as_asked_within_the_minutes() -> None:
    asked = Request(engine="e")
    request, names, limit = gate_plans.applied(plans(minutes=0.1), asked, (), None)
    assert (request.design, names, limit) == ({"max_minutes": 0.1}, (), None)


def test_a_calibration_is_read_as_it_was_written_and_shown_beside_the_step(tmp_path: Path) -> None:
    found, step = plans(minutes=2.0), tmp_path / "step.md"
    gate_plan_tables.write(tmp_path / "out", found, {"GITHUB_STEP_SUMMARY": str(step)})
    assert read_json(tmp_path / "out" / "calibration.json", GatePlans, "a calibration") == found
    first = (tmp_path / "out" / "calibration.md").read_text().splitlines()[0]
    assert first == f"**{gate_plan_tables.conclusion(found)}**"
    assert step.read_text().startswith(first)
    assert first.endswith("a gate, and 2 minutes at most.**")


def test_every_form_has_all_plans() -> None:
    found = plans()
    rows = list(csv.DictReader(io.StringIO(formats.to_csv(found))))
    assert [(row["metric"], float(row["limit"])) for row in rows] == [
        (plan.metric, plan.limit) for plan in found.plans
    ]
    text = formats.to_markdown(found)
    assert all(name in text for name in found.sd)
    assert "--max-regression" in text


def planned(**by_metric: dict[float, tuple[int, float]]) -> GatePlans:
    """Plans, by metric and limit: trials and minutes."""
    found = [
        gate_plans.GatePlan(metric=metric, limit=limit, blocks=blocks, minutes=minutes)
        for metric, by_limit in by_metric.items()
        for limit, (blocks, minutes) in by_limit.items()
    ]
    return msgspec.structs.replace(plans(minutes=3.0), plans=found, recommended=found[0])


def test_several_metrics_are_held_to_the_smallest_limit_that_each_of_them_holds() -> None:
    found = planned(steady={0.005: (6, 1.0), 0.05: (3, 0.5)}, noisy={0.02: (90, 15.0), 0.05: (40, 2.9)})
    request, names, limit = gate_plans.applied(found, Request(engine="e"), ("steady", "noisy"), None)
    assert (request.design["blocks"], names, limit) == (40, ("steady", "noisy"), 0.05)
    never = planned(steady={0.005: (6, 1.0)}, noisy={0.02: (90, 15.0)})
    request, _, limit = gate_plans.applied(never, Request(engine="e"), ("steady", "noisy"), None)
    assert (request.design, limit) == ({"max_minutes": 3.0}, None)


def test_a_recommendation_names_every_metric_that_a_gate_is_wanted_for() -> None:
    names = ("tpot_ms_p50", "ttft_ms_p50")
    found = plans(minutes=60.0, metrics=names)
    of_both = gate_plans.smallest(found.plans, names, 60.0)
    assert found.recommended in of_both
    assert found.recommended.blocks == max(plan.blocks for plan in of_both)
    assert "--metric tpot_ms_p50 --metric ttft_ms_p50 --max-regression" in gate_plan_tables.conclusion(found)
    # A gate by that plan is about each of them, too: a regression of any is to fail.
    assert gate_plans.applied(found, Request(engine="e"), (), None)[1] == names
