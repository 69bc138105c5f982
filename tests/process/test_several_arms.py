"""More than two arms in one interleaved run: their order, what is compared with what, and what it takes."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_bench.engines import api
from overlap_bench.harness.analysis import across_runs, comparison, explain, stored
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.design import Arm, Design, orders
from overlap_bench.harness.report import formats, html
from overlap_bench.harness.run import hosts, preflight, session
from overlap_bench.harness.run.patched import Patches
from overlap_bench.harness.run.trial import arms_in_order, arms_in_turns
from overlap_bench.harness.store.manifest import read_manifest, write_manifest
from overlap_bench.harness.store.tables import read_block
from overlap_bench.harness.studies import gate
from overlap_bench.harness.workload.workload import Workload
from tests.support.clockwork import installed
from tests.support.in_process import ended
from tests.support.made_blocks import manifest, result, shown, warned
from tests.support.made_runs import NAMES, stored_three, three, three_blocks

# -- order ------------------------------------------------------------------------------------------------


@given(st.text(), st.integers(0, 100), st.integers(1, 16))
def test_every_arm_runs_once_in_each_round(lot: str, number: int, arms: int) -> None:
    found = orders(lot, number, arms)
    assert sorted(found) == list(range(arms))
    assert found == orders(lot, number, arms)


@given(st.text(), st.integers(0, 10), st.integers(2, 16))
def test_in_six_blocks_each_arm_runs_both_before_the_first_arm_and_behind_it(
    lot: str, six: int, arms: int
) -> None:
    found = [orders(lot, number, arms) for number in range(6 * six, 6 * six + 6)]
    for arm in range(1, arms):
        assert {each.index(arm) < each.index(0) for each in found} == {True, False}


def test_every_order_is_as_likely_as_any_other() -> None:
    counts = Counter(tuple(orders("5", number, 3)) for number in range(6000))
    assert len(counts) == 6
    assert max(counts.values()) < 1.12 * min(counts.values()) + 60


def test_arms_run_in_the_order_that_was_drawn_for_their_block() -> None:
    plan = three()
    for number, order in enumerate(plan.orders):
        assert [arm.name for arm in arms_in_order(plan, number)] == [NAMES[each] for each in order]
    assert [arm.name for arm in arms_in_order(plan, -1)] == list(NAMES)


def test_arms_take_turns_in_an_order_that_each_run_draws_for_itself() -> None:
    """Also the runs of an experiment, whose names are the same each time, and those of one experiment."""
    plan = three()
    later = msgspec.structs.replace(plan, created="2026-05-05T03:02:01+00:00")
    other = msgspec.structs.replace(plan, run="b-run")
    found = [
        [[arm.name for arm in arms_in_turns(each, block, 0)] for block in range(6)]
        for each in (plan, later, other)
    ]
    assert all({*order} == {*NAMES} for each in found for order in each)
    assert found[0] != found[1] != found[2] != found[0]


# -- what is compared -------------------------------------------------------------------------------------


def test_each_other_arm_is_compared_with_the_first() -> None:
    found = comparison.result(three(), three_blocks((0.9, 0.8)))
    assert [each.variant for each in found.comparisons] == ["steps: half", "steps: all"]
    changes = [each.metrics["tpot_ms_p50"].change for each in found.comparisons]
    assert changes == pytest.approx([-0.1, -0.2], abs=0.002)
    assert {each.before.toggles["h2d"] for each in found.comparisons} == {"pageable"}
    assert [each.after.toggles["h2d"] for each in found.comparisons] == ["pinned", "packed"]
    assert shown(found, 120).count("Mechanism") == 2


def test_the_verdicts_of_several_comparisons_are_adjusted_together() -> None:
    found = comparison.result(three(), three_blocks((0.985, 0.8), noise=0.01))
    rows = [each.metrics["tpot_ms_p50"] for each in found.comparisons]
    assert rows[0].p > rows[1].p
    assert rows[0].p_adjusted == rows[0].p
    assert rows[1].p_adjusted == 2 * rows[1].p
    assert "over all comparisons of this run together (Holm)" in formats.to_markdown(found)
    alone = result().comparisons[0].metrics["tpot_ms_p50"]
    assert alone.p_adjusted is None


def test_a_comparison_says_nothing_of_the_other_arms() -> None:
    found = comparison.result(three(), three_blocks((1.0, 1.0), digest="other", lag_ms=4))
    half, both = found.comparisons
    assert half.outputs.identical == half.outputs.compared == 72
    assert both.outputs.identical == 0
    assert not any("late sends" in line for line in warned(half))
    assert any("late sends" in line for line in warned(both))


def test_the_order_of_two_of_several_arms_is_their_own() -> None:
    plan = three()
    pair = plan.pair("all", "half")
    assert [arm.name for arm in pair.design.arms] == ["all", "half"]
    assert pair.after_first == [each.index(1) < each.index(2) for each in plan.orders]
    assert set(pair.descriptions) == {"all", "half"}
    turned = manifest()
    assert turned.pair("after", "before").after_first == [not each for each in turned.after_first]
    assert turned.pair("before", "after") == turned


def test_a_run_without_orders_had_all_its_arms_turned_round_or_none(tmp_path: Path) -> None:
    """Runs of several arms were measured so before orders were drawn."""
    write_manifest(tmp_path, msgspec.structs.replace(three(), orders=[]))
    old = read_manifest(tmp_path)
    assert old.pair("half", "all").after_first == old.after_first
    assert old.pair("all", "before").after_first == [not each for each in old.after_first]


def test_any_two_arms_of_a_stored_run_can_be_compared(tmp_path: Path) -> None:
    folder = stored_three(tmp_path / "run")
    (found,) = across_runs.compare([f"{folder}:half", f"{folder}:all"]).result.comparisons
    assert found.metrics["tpot_ms_p50"].change == pytest.approx(0.8 / 0.9 - 1, abs=0.002)
    assert found.metrics["tpot_ms_p50"].verdict is None  # a pair that was chosen when all was measured
    assert "the run set out to compare its arms with before, and not all with half" in warned(found)[0]


def test_a_pair_that_the_run_compares_keeps_its_adjusted_verdict(tmp_path: Path) -> None:
    folder = stored_three(tmp_path / "run")
    (found,) = across_runs.compare([f"{folder}:before", f"{folder}:all"]).result.comparisons
    plan = read_manifest(folder)
    printed = comparison.result(plan, stored.finished(folder, plan)[0]).comparisons[1]
    assert found == printed
    assert found.metrics["tpot_ms_p50"].p_adjusted > found.metrics["tpot_ms_p50"].p


def test_the_batches_of_a_third_arm_are_no_matter_to_a_pair() -> None:
    plan, measured = three(), three_blocks((0.9, 0.8))
    for each in measured:
        steps = each.tables["steps"]
        late = steps["step"] > steps["step"].median()
        steps.loc[late & (steps["arm"] != "half"), "batch"] = 3  # a batch that `half` never had
        steps.loc[late & (steps["arm"] != "half"), "device_end_ns"] += steps["step"] * 1_000_000
    _, pair = comparison.result(plan, measured).comparisons
    alone = comparison.of_pair(plan, measured, "before", "all")
    for name in definitions.MATCHED:
        assert pair.metrics[name] == msgspec.structs.replace(alone.metrics[name], p_adjusted=None)


def test_what_needs_a_before_and_an_after_says_so(tmp_path: Path) -> None:
    folder = stored_three(tmp_path / "run")
    for use in (
        lambda: explain.explain(folder),
        lambda: gate.judge(folder, (), None),
        lambda: html.write(folder, tmp_path / "report.html"),
    ):
        with pytest.raises(api.BadSetting, match=r"has 3 arms, and this takes a before and an after"):
            use()
    with pytest.raises(api.BadSetting, match=r"has 3 arms: choose .*:before or .*:half or .*:all"):
        across_runs.compare([str(folder)] * 2)


def test_the_compare_that_is_offered_for_several_arms_works_as_printed(tmp_path: Path) -> None:
    folder = stored_three(tmp_path / "a run")
    with pytest.raises(api.BadSetting, match="any two of before, half, all use") as refused:
        across_runs.compare([str(folder)])
    command = str(refused.value).partition("use bench compare ")[2]
    (found,) = across_runs.compare(shlex.split(command)).result.comparisons
    assert found.metrics["tpot_ms_p50"].verdict == "faster"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plant": 0.03}, "--inject-delay slows the after arm"),
        ({"arms": "same"}, "half and all are the same settings"),
        ({"arms": "names"}, "two arms have the name half"),
    ],
)
def test_what_means_nothing_with_several_arms_is_refused(change: dict[str, Any], message: str) -> None:
    before, half, last = three().design.arms
    arms = {
        "same": (before, half, msgspec.structs.replace(half, name="all")),
        "names": (before, half, msgspec.structs.replace(last, name="half")),
    }
    change = {name: arms.get(value, value) for name, value in change.items()}
    with pytest.raises(api.BadSetting, match=message):
        msgspec.structs.replace(three().design, **change).check()


def test_arms_that_do_not_fit_into_memory_are_refused() -> None:
    gib = 1 << 30
    hosts.check_memory(booted=2, arms=8, taken=2 * gib, free=6 * gib)
    with pytest.raises(api.BadSetting, match=r"8 arms at once need about 8\.0 GiB, and with 2"):
        hosts.check_memory(booted=2, arms=8, taken=2 * gib, free=5 * gib)


@pytest.mark.parametrize(
    ("alone", "asks", "device", "expected"),
    [
        (False, False, "cuda", [2, 1, 3]),
        (True, False, "cuda", [1] * 6),
        (True, True, "cuda", [1] * 6),
        (True, False, "cpu", [1, 1, 1, 3]),
        (True, True, "cpu", [2, 1, 3]),
    ],
)
def test_first_boots_are_two_at_once_and_later_ones_as_many_as_cores_allow_or_each_starts_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, alone: bool, asks: bool, device: str, expected: list[int]
) -> None:
    """What the first two take says whether all of them fit. Arms that start alone share a card's memory; that
    they have none they say when they are asked, or once they have booted."""
    spec = api.EngineSpec("e", "", (), "x:y", starts_alone=alone, preflight=asks)
    for module in (session, preflight):
        monkeypatch.setattr(module, "spec_of", lambda arm: spec)
    assert [hosts.side_by_side(cores) for cores in (1, 8, 16, 17)] == [2, 2, 4, 4]
    monkeypatch.setattr(session, "side_by_side", lambda cores: 4)
    monkeypatch.setattr(session, "check_interpreter", lambda arm: None)
    monkeypatch.setattr(preflight, "check", lambda arms: [device] * len(arms))
    monkeypatch.setattr(session, "private_bytes", lambda booted: 0)
    at_once: list[int] = []

    def boot(self: session.Session, arms: Sequence[Arm], on_booting: object, watch: object) -> dict[str, Any]:
        at_once.append(len(arms))
        self._boots += len(arms)
        said = SimpleNamespace(device={"kind": device})
        return {arm.name: SimpleNamespace(children=(), description=said) for arm in arms}

    monkeypatch.setattr(session.Session, "_boot", boot)
    run = session.Session()
    run._patches = Patches(tmp_path)  # as entering the session makes them
    for _ in range(2):
        assert set(run.boot(three().design.arms)) == set(NAMES)
    assert at_once == expected


def test_engines_that_size_themselves_by_the_memory_they_find_free_say_so() -> None:
    alone = {name for name, spec in api.find_engines().items() if spec.starts_alone}
    assert {"openai", "vllm"} <= alone
    assert "overlap" not in alone


# -- real processes ---------------------------------------------------------------------------------------


def test_three_arms_from_boot_to_result(tmp_path: Path) -> None:
    """By `bench rerun --trust`, which measures whatever a manifest says."""
    choices = ({"pace": "slow"}, {"pace": "fast"}, {"pace": "fast", "service": "all", "tokens": "shifted"})
    arms = tuple(
        Arm(
            name=name,
            engine="clockwork",
            options=api.EngineOptions(),
            toggles={"pace": "slow", "tokens": "counted", "boot": "works", "service": "all", **toggles},
        )
        for name, toggles in zip(NAMES, choices, strict=True)
    )
    workload = Workload(num_requests=4, max_new_tokens=8, interval_ms=1, pretok=False)
    design = Design(name="steps", arms=arms, workload=workload, blocks=2, rounds=2)
    write_manifest(tmp_path / "planned", msgspec.structs.replace(three(2), design=design))
    again = ("rerun", "planned", "--trust", "--format", "json")
    found = json.loads(ended(installed(tmp_path), tmp_path, *again, code=1).out)  # tokens differ
    assert [each["outputs"]["identical"] for each in found["comparisons"]] == [16, 0]
    (folder,) = (tmp_path / "results").iterdir()
    kept = read_manifest(folder)
    assert kept.orders == [orders(kept.run, number, 3) for number in range(2)]
    for number in range(2):
        rounds = read_block(folder, number)["rounds"].sort_values(["round", "position"])
        ran = [list(each["arm"]) for _, each in rounds.groupby("round")]
        assert ran[0] == [NAMES[arm] for arm in kept.orders[number]] == ran[1]
        assert rounds.groupby("round")["seed"].nunique().eq(1).all()
