"""From stored blocks to the JSON object: what each metric, output, count and limit comes to."""

import json

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, gate, outputs, words
from overlap_bench.harness.analysis.mechanism import mechanism
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import Counter, Outputs
from overlap_bench.harness.analysis.values import block_values, judged, so_far
from overlap_bench.harness.metrics import definitions, digests
from overlap_bench.harness.report import formats
from overlap_bench.harness.report.tables import outputs_line
from overlap_bench.harness.store.manifest import ChangedCode, Overlaid
from overlap_bench.harness.workload.workload import Workload
from tests.support.made_blocks import (
    block,
    blocks,
    described,
    manifest,
    result,
    shown,
    side,
    warned,
)

TOP = {"schema_version", "run", "device", "stopped_because", "comparisons"}
COMPARISON = {
    "variant", "before", "after", "trials", "left_out", "confidence", "margin", "primary", "metrics",
    "outputs", "failures", "mechanism", "limit", "prediction", "interleaved", "nodes", "changed_code",
    "overlaid", "warnings",
}  # fmt: skip
METRIC = {
    "unit", "better", "before", "after", "change", "delta", "ci_low", "ci_high", "sd", "counted", "p",
    "p_adjusted", "verdict", "floor",
}  # fmt: skip


def test_json_has_exactly_the_promised_keys() -> None:
    found = to_plain(result())
    assert set(found) == TOP
    (only,) = found["comparisons"]
    assert set(only) == COMPARISON
    assert {frozenset(row) for row in only["metrics"].values()} == {frozenset(METRIC)}
    assert set(only["outputs"]) == {"compared", "identical", "near_ties", "distinct", "weak"}
    assert found["device"] == "emulated"
    row = only["metrics"][only["primary"]]
    top = {"headline": words.conclusion("emulated", result().comparisons[0]), "verdict": row["verdict"]}
    assert row["verdict"] == "faster"
    assert json.loads(formats.to_json(result())) == found | top


def test_a_faster_after() -> None:
    only = result(0.9, lag_ms=0.3).comparisons[0]
    lag = only.metrics["submit_lag_ms_p99"]
    assert (lag.change, lag.delta) == (None, pytest.approx(0.2))  # it can be zero
    row = only.metrics["tpot_ms_p50"]
    assert row.verdict == "faster"
    assert row.change == pytest.approx(-0.1, abs=0.002)
    assert row.ci_low < row.change < row.ci_high < 0
    assert row.change == pytest.approx(row.after / row.before - 1)
    weak = "all are one of 12 texts, as every request asked the same prompt; try --prompts english"
    assert only.outputs == Outputs(compared=72, identical=72, near_ties=None, distinct=12, weak=weak)
    assert only.mechanism["copies"] == Counter(before=7, after=7, unit="per step")
    assert only.mechanism["mean_batch"].before == 4
    assert set(only.limit) == {"device_busy", "exposed_host_us"}
    assert only.limit["exposed_host_us"].before == pytest.approx(3000, rel=0.01)


def test_only_declared_metrics_carry_verdicts() -> None:
    found = result(plan=manifest(secondaries=("latency_ms_p50", "itl_token_ms_p50")))
    metrics_of = found.comparisons[0].metrics
    judged = {name for name, row in metrics_of.items() if row.verdict is not None}
    assert judged == {"tpot_ms_p50", "latency_ms_p50", "itl_token_ms_p50"}
    adjusted = {name for name, row in metrics_of.items() if row.p_adjusted is not None}
    assert adjusted == {"latency_ms_p50", "itl_token_ms_p50"}


@pytest.mark.parametrize(
    "workload",
    [
        Workload(arrival="poisson", rate=50.0),
        Workload(arrival="gamma", rate=50.0, burstiness=0.5),
        Workload(arrival="trace", trace="x", max_new_tokens=None),
    ],
)
def test_offered_load_is_told_from_what_was_due(workload: Workload) -> None:
    plan = manifest(secondaries=("throughput_req_s",), workload=workload)
    assert result(0.9, plan).comparisons[0].metrics["throughput_req_s"].verdict is None
    closed = manifest(secondaries=("throughput_req_s",), workload=Workload(arrival="closed", concurrency=4))
    assert result(0.9, closed).comparisons[0].metrics["throughput_req_s"].verdict is not None


def test_goodput_is_made_from_the_objectives_of_the_design() -> None:
    plan = manifest(goodput={"tpot": 3.8}, secondaries=("goodput_req_s",))
    found = result(0.9, plan)
    row = found.comparisons[0].metrics["goodput_req_s"]
    assert row.before == 0  # 4 ms a token, in every block
    assert row.after > 0
    assert row.change is None
    assert row.verdict == "better"
    assert "goodput_req_s" in shown(found, 120)
    assert "goodput_req_s" not in result(0.9).comparisons[0].metrics


def test_one_arm_alone() -> None:
    alone = [block(number, {"before": side(4)}) for number in range(2)]
    found = comparison.result(manifest(blocks=2, arms=1), alone)
    only = found.comparisons[0]
    assert only.after is None
    row = only.metrics["tpot_ms_p50"]
    assert {name for name, value in msgspec.structs.asdict(row).items() if value is not None} == {
        "unit",
        "better",
        "before",
    }
    assert "TPOT p50 is 4 ms (2 trials, " in words.conclusion(found.device, only)
    assert "One arm" in shown(found, 100)
    assert "| tpot_ms_p50 | 4 ms |" in formats.to_markdown(found)
    half = msgspec.structs.replace(described(), deterministic=False)
    plan = msgspec.structs.replace(manifest(blocks=2, arms=1), descriptions={"before": half})
    (only,) = comparison.result(plan, alone).comparisons
    assert not any("outputs" in line for line in warned(only))  # nothing is compared


def test_an_engine_without_step_records() -> None:
    bare = [
        block(
            number,
            {name: {key: side(4)[key] for key in ("requests", "rounds")} for name in ("before", "after")},
        )
        for number in range(2)
    ]
    only = comparison.result(manifest(blocks=2), bare).comparisons[0]
    assert only.limit == {}
    assert only.mechanism["copies"].unit == "per round"
    assert "device_busy" not in only.metrics


def test_sampled_outputs_that_differ_are_told_and_fail_nothing() -> None:
    sampled = manifest(workload=Workload(temperature=0.8))
    found = result(plan=sampled, digest="e")
    assert "OUTPUTS DIFFER in 72 of 72 requests" in words.conclusion(found.device, found.comparisons[0])
    assert any("a difference fails this run only where" in line for line in warned(found.comparisons[0]))
    assert not outputs.outputs_differ(sampled, found)


def test_requests_that_failed_in_an_arm_have_no_outputs_to_compare() -> None:
    measured = blocks(0.9)
    for each in measured:
        asked = each.tables["requests"]
        asked.loc[asked["request"] < 2, ["error", "digest"]] = ["no room", "nothing"]
        only_after = (asked["request"] == 2) & (asked["arm"] == "after")
        asked.loc[only_after, ["error", "digest"]] = ["no room", "nothing"]
    found = comparison.result(manifest(), measured).comparisons[0]
    weak = found.outputs.weak
    assert found.outputs == Outputs(compared=54, identical=54, near_ties=None, distinct=9, weak=weak)
    assert [side.failed for side in found.failures.values()] == [12, 18]


def test_a_metric_that_one_block_lacks_is_compared_over_no_others() -> None:
    """A mean over other blocks on one side would compare different things."""
    measured = blocks(0.9)
    asked = measured[2].tables["requests"]
    asked.loc[asked["arm"] == "after", ["accepted_ns", "tokenized_ns"]] = -1
    rows = comparison.result(manifest(), measured).comparisons[0].metrics
    assert rows["latency_ms_p50"].after is not None
    assert rows["queue_wait_ms_p50"].before is not None
    waited = rows["queue_wait_ms_p50"]
    assert {waited.after, waited.change, waited.delta, waited.ci_low} == {None}


def test_what_can_not_be_compared_is_named_by_its_block_and_arm() -> None:
    measured = blocks(0.9)
    rounds = measured[3].tables["requests"]
    rounds.loc[rounds["arm"] == "after", "completion_tokens"] = 1
    said = "tpot_ms_p50 has no value in trial 3 of after, so it .* got one token each, or all .* at once"
    with pytest.raises(api.EngineError, match=said):
        comparison.result(manifest(), measured)


def test_a_secondary_without_a_value_is_told_and_keeps_its_place_among_the_others() -> None:
    measured = blocks(0.98, noise=0.02)
    alone = comparison.result(manifest(secondaries=("latency_ms_p50",)), measured).comparisons[0]
    asked = measured[3].tables["requests"]
    asked.loc[asked["arm"] == "before", "tokenized_ns"] = -1
    plan = manifest(secondaries=("latency_ms_p50", "tokenize_ms_p50"))
    found = comparison.result(plan, measured).comparisons[0]
    assert "no verdict on tokenize_ms_p50: it has no value in trial 3 of before; " in "".join(warned(found))
    row = found.metrics["latency_ms_p50"]
    assert 0.001 < row.p < 0.5
    assert row.p_adjusted == pytest.approx(min(1, 2 * row.p))  # two were declared
    assert alone.metrics["latency_ms_p50"].p_adjusted == pytest.approx(row.p)


def test_a_gate_fails_where_nothing_is_left_of_a_metric() -> None:
    plan = manifest(goodput={"tpot": 5.0})
    values = [block_values(plan.design, each) for each in blocks(2.0)]
    names = ("goodput_req_s", "ttft_ms_p50")
    found = judged(plan.design, values, names, 0.02)
    assert list(found) == list(names)
    row = found["goodput_req_s"]
    assert (row.after, row.change, row.verdict, row.remark) == (0, -1, "fail", "0 in every trial of after")
    assert row.before > 0
    assert row.p == 2 * 0.5**6
    (compared,) = comparison.result(plan, blocks(2.0)).comparisons
    gated = gate.result_of(found, 0.02, 0.05, compared, True, "pass")
    (drawn,) = gate.benchmark(compared, gated, "higher")
    assert (drawn.value, drawn.range) == (0, "")  # its interval is in requests a second, not in percent
    few = judged(plan.design, values[:4], names, 0.02)["goodput_req_s"]
    assert (few.verdict, few.p) == ("undecided", 2 * 0.5**4)  # of two metrics: Holm


def test_a_gate_says_where_a_metric_has_no_ratio() -> None:
    plan = manifest(goodput={"tpot": 3.8})
    values = [block_values(plan.design, each) for each in blocks(0.9)]
    with pytest.raises(api.EngineError, match="goodput_req_s is 0 in trial 0 of before"):
        judged(plan.design, values, ["goodput_req_s"], 0.02)


def test_a_counter_is_per_round_in_both_arms_where_one_records_no_steps() -> None:
    measured = blocks(1.0)
    for each in measured:
        steps = each.tables["steps"]
        each.tables["steps"] = steps[steps["arm"] == "before"]
    found = mechanism(manifest().design, measured)["copies"]
    assert found == Counter(before=70.0, after=70.0, unit="per round")


def test_a_counter_of_a_kind_of_step_is_per_step_of_that_kind() -> None:
    measured = blocks(1.0)
    for each in measured:
        rounds, made = each.tables["rounds"], each.tables["steps"]
        rounds["counter.decode_launches"] = 6
        rounds["counter.mixed_launches"] = 6  # no step was one
        share = (made["kind"] == "decode").mean()
    found = mechanism(manifest().design, measured)
    per_step = found["mixed_launches"]
    assert per_step.unit == "per step"
    assert found["decode_launches"].unit == "per decode step"
    assert found["decode_launches"].before == pytest.approx(per_step.before / share)


def test_dropped_rows_are_counted_per_round_in_both_arms() -> None:
    """The engine counts them besides, where it dropped any."""
    measured = blocks(0.9)
    for each in measured:
        rounds, made = each.tables["rounds"], each.tables["steps"]
        rounds.loc[rounds["arm"] == "after", "counter.dropped_rows"] = 2
        made.loc[(made["arm"] == "after") & (made["step"] == 3), "dropped"] = 2
    found = mechanism(manifest().design, measured)["dropped_rows"]
    assert found == Counter(before=0.0, after=2.0, unit="per round")


def test_outputs_of_two_models_are_not_compared() -> None:
    plan = manifest()
    before, after = plan.design.arms
    other = msgspec.structs.replace(after, options=msgspec.structs.replace(after.options, model="tiny-llama"))
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=(before, other)))
    assert outputs.same(plan, blocks(0.9)).compared == 0
    plan = manifest()  # a server says itself which model it has
    other = msgspec.structs.replace(plan.descriptions["after"], model={"name": "another"})
    served = msgspec.structs.replace(plan, descriptions={**plan.descriptions, "after": other})
    assert outputs.same(plan, blocks(0.9)).compared > outputs.same(served, blocks(0.9)).compared == 0


def test_token_ids_are_not_compared_with_a_text() -> None:
    """As where one server was asked for ids: equal outputs would all count as different ones."""
    measured = blocks(0.9)
    for each in measured:
        requests = each.tables["requests"]
        its = requests["arm"] == "after"
        requests.loc[its, "digest"] = [digests.of_text(["a", str(n)]) for n in range(its.sum())]
    found = outputs.same(manifest(), measured)
    assert found.compared == 0
    line = outputs_line(comparison.result(manifest(), measured).comparisons[0])
    assert line == f"Outputs: none could be compared: {outputs.IN_TWO_FORMS}."
    for each in measured:  # nothing is nothing, in either form
        requests = each.tables["requests"]
        requests.loc[requests["arm"] == "before", "digest"] = digests.of_tokens([])
    found = outputs.same(manifest(), measured)
    assert found.compared > found.identical == 0


def test_what_a_run_shows_so_far_needs_two_blocks_of_two_arms() -> None:
    design = manifest().design
    values = [block_values(design, each) for each in blocks(0.9)]
    assert so_far(design, values[:3]).startswith("tpot_ms_p50 −10")
    assert so_far(design, values[:1]) == ""
    alone = manifest(arms=1).design
    assert so_far(alone, [{"before": each["before"]} for each in values]) == ""
    without = [{arm: {} for arm in each} for each in values]
    assert so_far(design, without) == ""


def test_device_times_that_hold_host_work_split_no_step() -> None:
    """Half a millisecond of host work in them would be shown as the device's, and judged as none of the
    host's."""
    plan = manifest()
    assert "host time that the device does not hide" in shown(result(plan=plan), 200)
    for held in ("the model runner", None):
        arms = tuple(msgspec.structs.replace(arm, device_holds=held) for arm in plan.design.arms)
        held_there = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
        found = result(plan=held_there)
        assert not set(definitions.SPLIT) & set(found.comparisons[0].metrics)
        assert set(definitions.SPLIT.values()) & set(found.comparisons[0].metrics)
        assert found.comparisons[0].limit == {}
        text = shown(found, 200)
        assert not any(said in text for said in ("exposed host", "device time", "device_busy"))


def test_a_change_that_never_ran_is_shown_and_not_judged() -> None:
    changed = ChangedCode(
        functions=2,
        in_rounds=[],
        at_boot=[],
        never=["map.py: Map.get", "map.py: Map.insert"],
        unseen=[],
        other=[],
        used=[],
        counts=False,
    )
    laid = [Overlaid(file="pkg/_C.so", sha256="0123456789abcdef")]
    plan = msgspec.structs.replace(manifest(), changed_code=changed, overlaid=laid)
    (judged,) = result(0.9).comparisons
    (found,) = result(0.9, plan).comparisons
    assert judged.metrics["tpot_ms_p50"].verdict == "faster"
    assert not any(row.verdict for row in found.metrics.values())
    said = (
        "no verdict: none of the 2 functions that differ ran in a round: map.py: Map.get, map.py: Map.insert"
    )
    assert said in words.conclusion("emulated", found)
    text = shown(result(0.9, plan), 300)
    assert text.splitlines()[0].startswith(f"{found.variant}: {said}. ")
    assert "Changed code: 2 functions differ. Never ran: map.py: Map.get, map.py: Map.insert." in text
    assert "no ref has: pkg/_C.so (0123456789)" in text
    assert to_plain(found)["changed_code"]["counts"] is False
    ran = msgspec.structs.replace(changed, in_rounds=changed.never[1:], never=changed.never[:1], counts=True)
    (found,) = result(0.9, msgspec.structs.replace(plan, changed_code=ran)).comparisons
    assert found.metrics["tpot_ms_p50"].verdict == "faster"
