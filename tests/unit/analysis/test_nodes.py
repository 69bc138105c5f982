"""A run on several nodes: the change on each, whether they disagree, and what is said of the machines."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from overlap_bench.harness.analysis import comparison, nodes, noise_floor
from overlap_bench.harness.analysis.result import Comparison, Effect, Result
from overlap_bench.harness.analysis.values import block_seconds, block_values
from overlap_bench.harness.store.manifest import Manifest, Repeat
from overlap_bench.harness.store.tables import Block
from tests.support.made_blocks import block, manifest, shown, side, warned
from tests.support.made_runs import TPOT, factorial_blocks, planned_factorial


def measured(changes: dict[str, Sequence[float]]) -> tuple[Manifest, list[Block]]:
    """A run whose blocks had these changes of TPOT, by node."""
    random = np.random.default_rng(5)
    made = []
    for node, own in changes.items():
        for change in own:
            both = {"before": side(4.0), "after": side(4.0 * (1 + change))}
            made.append(block(len(made), both))
            made[-1].tables["rounds"]["node"] = node
    order = random.permutation(len(made))  # nodes take turns as they come
    mixed = [Block(number, made[place].tables) for number, place in enumerate(order)]
    plan = manifest(len(made))
    return msgspec.structs.replace(plan, nodes=dict.fromkeys(changes, plan.machine)), mixed


def found(changes: dict[str, Sequence[float]]) -> Comparison:
    return comparison.result(*measured(changes)).comparisons[0]


AGREE = {"a": [-0.051, -0.049, -0.050], "b": [-0.050, -0.049, -0.051]}
DISAGREE = {"a": [-0.081, -0.079, -0.080], "b": [-0.020, -0.021, -0.019]}


def test_nodes_that_agree_leave_the_interval_as_it_is() -> None:
    on_two, alone = found(AGREE), found({"a": [*AGREE["a"], *AGREE["b"]]})
    assert alone.nodes is None
    assert on_two.nodes.unit == "trial"
    assert on_two.metrics["tpot_ms_p50"].sd == pytest.approx(alone.metrics["tpot_ms_p50"].sd)
    assert on_two.metrics["tpot_ms_p50"].verdict == "faster"
    assert not any("nodes disagree" in each for each in warned(on_two))


def test_each_node_shows_its_own_change() -> None:
    changes = found(DISAGREE).nodes
    assert changes.changes["a"].change == pytest.approx(-0.08, abs=0.001)
    assert changes.changes["b"].change == pytest.approx(-0.02, abs=0.001)
    assert changes.changes["a"].blocks == 3


def test_where_nodes_disagree_each_counts_once() -> None:
    apart = found(DISAGREE)
    row = apart.metrics["tpot_ms_p50"]
    assert apart.nodes.unit == "node"
    assert row.verdict == "undecided"  # two nodes say nothing of a third
    assert any("nodes disagree" in each and "measure on more nodes" in each for each in warned(apart))
    many = {str(node): [-0.05 + 0.004 * node] * 2 for node in range(6)}
    decided = found({node: [each + 0.0001, each - 0.0001] for node, (each, _) in many.items()})
    assert decided.nodes.unit == "node"
    assert decided.metrics["tpot_ms_p50"].verdict == "faster"
    assert any("nodes disagree" in each and "more nodes narrow it" in each for each in warned(decided))
    assert not any("too few trials" in each for each in warned(decided))


def test_the_floor_of_equal_arms_is_their_interval_where_nodes_disagree() -> None:
    plan, made = measured({"a": [-0.01, -0.011], "b": [0.01, 0.011], "c": [0.0, 0.001]})
    only = comparison.result(plan, made).comparisons[0]
    row = only.metrics["tpot_ms_p50"]
    assert (only.nodes.unit, row.counted) == ("node", 3)
    half = (np.log1p(row.ci_high) - np.log1p(row.ci_low)) / 2
    floor = noise_floor.floor_of(plan, only).metrics["tpot_ms_p50"].floor
    assert np.log1p(floor) == pytest.approx(half)


def test_the_table_says_what_the_test_could_have_seen() -> None:
    said = shown(comparison.result(*measured(AGREE)), 120)
    assert "tpot_ms_p50 by node" in said
    assert "are not seen to disagree" in said
    assert "of such runs would find it" in said
    assert "disagree, and each counts once" in shown(comparison.result(*measured(DISAGREE)), 120)
    assert "by node" not in shown(comparison.result(*measured({"a": AGREE["a"]})), 120)


def test_a_gate_is_told_which_metric_nodes_disagree_about() -> None:
    for changes, told in ((AGREE, None), (DISAGREE, "nodes disagree about tpot_ms_p50")):
        plan, blocks = measured(changes)
        values = [block_values(plan.design, each) for each in blocks]
        said = nodes.disagreement(plan.design, values, [each.node for each in blocks], ["tpot_ms_p50"])
        assert said is None if told is None else (said or "").startswith(told)


def test_the_time_of_a_block_is_taken_by_the_clock_of_its_own_node() -> None:
    _, blocks = measured(AGREE)
    seen = {"a": 0, "b": 0}
    for each in blocks:
        began = seen[each.node] * 20e9 + (7e12 if each.node == "b" else 0.0)  # since each machine was booted
        each.tables["rounds"]["started_ns"] = np.int64(began)
        seen[each.node] += 1
    assert block_seconds(blocks) == 20.0


def test_unequal_machines_and_blocks_measured_once_more_are_told() -> None:
    plan, blocks = measured(AGREE)
    assert not any("unequal nodes" in each or "once more" in each for each in warned_of(plan, blocks))
    other = msgspec.structs.replace(plan.machine, cores=4)
    plan = msgspec.structs.replace(
        plan, nodes={**plan.nodes, "b": other}, repeats=[Repeat(block=2, reason="its node died")]
    )
    said = "\n".join(warned_of(plan, blocks))
    assert "unequal nodes: b is not like a: cores was 2, is 4; " in said
    assert "failed and repeated: trial 3 (its node died); " in said


def test_the_machine_that_went_on_without_a_cluster_may_be_unlike_its_nodes_too() -> None:
    plan, blocks = measured(AGREE)
    head = msgspec.structs.replace(plan, machine=msgspec.structs.replace(plan.machine, cores=4))
    assert not any("unequal nodes" in each for each in warned_of(head, blocks))  # it measured nothing
    del blocks[-1].tables["rounds"]["node"]
    said = "\n".join(warned_of(head, blocks))
    assert "unequal nodes: the machine without a cluster is not like a: cores was 2, is 4" in said


def warned_of(plan: Manifest, blocks: list[Block]) -> list[str]:
    return warned(comparison.result(plan, blocks).comparisons[0])


def mains(found: Result) -> list[Effect]:
    effects = found.factorial.metrics["tpot_ms_p50"].effects
    return [each for each in effects if len(each.effect) == 1]


def test_nodes_that_disagree_about_one_effect_of_a_factorial_count_once_there_and_not_elsewhere() -> None:
    plan, half = (planned_factorial("h2d,output", blocks=count) for count in (8, 4))
    more = {arm: tpot * (0.97 if "h2d" in arm else 1.0) for arm, tpot in TPOT.items()}  # what h2d gains on b

    def found(on_b: dict[str, float], nodes: str) -> Result:
        made = [*factorial_blocks(half, TPOT), *factorial_blocks(half, on_b)]  # with the same luck
        for each, node in zip(made, nodes, strict=True):
            each.tables["rounds"]["node"] = node
        return comparison.result(plan, [Block(number, each.tables) for number, each in enumerate(made)])

    def told(result: Result) -> list[str]:
        return [each.text for each in result.factorial.warnings if each.kind == "nodes_disagree_about"]

    agree, apart = found(TPOT, "aaaabbbb"), found(more, "aaaabbbb")
    assert [each.verdict for each in mains(agree)] == ["faster", "faster"]
    assert [each.sd for each in mains(agree)] == [each.sd for each in mains(found(TPOT, "aaaaaaaa"))]
    assert [each.verdict for each in mains(apart)] == [
        "undecided",
        "faster",
    ]  # two nodes say nothing of a third
    assert told(agree) == []
    (said,) = told(apart)
    assert said.startswith("nodes disagree about h2d; each of the 2 nodes counts once there")
