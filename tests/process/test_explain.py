"""`bench explain` on stored runs: what is printed, in every form, and what it refuses in one line."""

import csv
import io
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import explain
from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.analysis.result import NoPrediction
from overlap_bench.harness.analysis.stored import so_far
from overlap_bench.harness.metrics import ranks, slices
from overlap_bench.harness.metrics.attribution import PARTS
from overlap_bench.harness.metrics.definitions import SLICED, SLICED_MEAN
from overlap_bench.harness.report import explain_tables
from overlap_bench.harness.report import page as pages
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import read_manifest, write_manifest
from overlap_bench.harness.store.tables import Block
from tests.support.in_process import bench
from tests.support.made_blocks import MS, blocks, manifest, warned
from tests.support.made_runs import stored

TOP = {"device_holds", "foretold", "unit",
    "schema_version", "run", "device", "variant", "headline", "before", "after", "trials", "confidence",
    "measured_in", "why_rounds", "intervals", "largest", "step_us", "ranks", "tail", "prediction", "warnings",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(stored(tmp_path_factory.mktemp("stored"), "a", 0.9))


@pytest.fixture(scope="module")
def found(run: Path) -> explain.Explained:
    return explain.explain(run)


def test_parts_add_up_to_the_interval_in_both_arms_and_in_the_change(found: explain.Explained) -> None:
    assert set(to_plain(found)) == TOP
    whole = found.step_us["interval"]
    for column in ("before", "after", "delta", "share_before", "share_after"):
        parts = [getattr(found.step_us[part], column) for part in PARTS]
        assert sum(parts) == pytest.approx(getattr(whole, column)), column
    assert whole.delta == pytest.approx(-400, rel=0.01)
    assert whole.ci_low < whole.delta < whole.ci_high
    assert found.step_us["device"].before == pytest.approx(1000)
    assert found.prediction == NoPrediction(none="the models know the steps of the engine `overlap` only")


SHARES = {"device": 0.5, "h2d": 0.3, "unattributed": 0.2}  # of the before arm's 4 ms


def with_turns(block: Block, after: dict[str, float], noise: float = 0.0) -> dict[str, pd.DataFrame]:
    """The tables of a block with 20 turns of each arm, whose parts of a step are these, ms. In rounds the
    after arm changes by another share. Every fifth of its turns has a stall."""
    rows = []
    parts = {"before": {name: 4 * share for name, share in SHARES.items()}, "after": after}
    for arm, turn in product(parts, range(20)):
        spent = {f"{slices.PART}{name}": 0.0 for name in PARTS}
        spent |= {f"{slices.PART}{name}": ms * MS for name, ms in parts[arm].items()}
        spent[f"{slices.PART}device"] += noise * MS * (arm == "after")
        spent[f"{slices.PART}output"] += 9 * MS * (turn % 5 == 0 and arm == "after")
        rows.append({"arm": arm, "turn": turn, "first_step": 4 * turn, **spent})
        rows[-1]["interval_ns"] = round(sum(spent.values()))
    always = {"round": 0, "steps": 4, "batch": 4, "tokens": 16, "device_ns": 2 * MS, "turn_ns": 5 * MS}
    made = pd.DataFrame(rows).assign(**always, parked_ns=MS, parked_cpu_ns=0)
    return {**block.tables, "slices": made}


def run_in_turns(folder: Path, after: dict[str, float], noises: Sequence[float], **design: Any) -> Path:
    plan = manifest(len(noises), segments=1, primary=SLICED, **design)
    write_manifest(folder, plan)
    for each, noise in zip(blocks(0.95, len(noises)), noises, strict=True):
        tables.write_block(folder, each.number, with_turns(each, after, noise))
    return folder


def test_phases_are_of_turns_where_there_were_turns_and_agree_with_the_first_line(tmp_path: Path) -> None:
    noises = [0.01, -0.01, 0.012, -0.012, 0.008, -0.008]
    found = explain.explain(run_in_turns(tmp_path, {"device": 2.0, "h2d": 0.8, "unattributed": 0.8}, noises))
    assert found.measured_in == "turns"
    assert "The decode step is 10.0% shorter" in found.headline
    whole = found.step_us["interval"]
    assert (whole.before, whole.after) == pytest.approx((4000, 3600))  # in rounds it is another share
    assert found.step_us["h2d"].delta == pytest.approx(-400)
    assert found.step_us["output"].after == 0  # rare stalls, which the first line leaves out too
    assert found.largest == "h2d"
    line = explain_tables.step_line(found)
    assert line.startswith("In turns: a decode step takes 4,000 us before and 3,600 after (−400.0 us [")
    assert "the largest is in h2d: −400.0 us [−400, −400]." in line
    assert found.intervals == {"before": 120, "after": 120}


def test_a_trial_that_the_result_leaves_out_is_not_explained(tmp_path: Path) -> None:
    noises = [0.01, -0.01, 2.0, 0.012, -0.012, 0.008, -0.008]
    run = run_in_turns(tmp_path, {"device": 2.0, "h2d": 0.8, "unattributed": 0.8}, noises)
    beside = tables.read_table(run, 2, "slices")
    tables.write_table(tables.table_path(run, 2, "slices"), beside.assign(others_ns=8 * MS))
    found = explain.explain(run)
    assert (found.blocks, found.step_us["interval"].after) == (6, pytest.approx(3600))
    plan = read_manifest(run)
    nine = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, blocks=9))
    assert warned(so_far(run, nine).comparisons[0])[0].startswith("not finished: 7 of 9 trials are done; ")


def test_where_nodes_disagree_a_part_counts_once_for_each_of_them(tmp_path: Path) -> None:
    same = {name: 4 * share for name, share in SHARES.items()}
    noises = [-0.80, -0.79, -0.81, -0.30, -0.31, -0.29]  # three trials of one node, three of another
    for told in ("trial", "node"):
        run = run_in_turns(tmp_path / told, same, noises)
        for number in range(6 if told == "node" else 0):
            rounds = tables.read_table(run, number, "rounds").assign(node=("one", "two")[number // 3])
            tables.write_table(tables.table_path(run, number, "rounds"), rounds)
        found = explain.explain(run)
        device = found.step_us["device"]
        assert (found.unit, found.largest) == (told, "device" if told == "trial" else None)
        assert device.delta == pytest.approx(-550)
        assert (device.ci_high < 0) is (told == "trial")
        assert f"t over {told}s" in explain_tables.step_table(found).note


def test_no_part_is_named_whose_change_holds_0(tmp_path: Path) -> None:
    same = {name: 4 * share for name, share in SHARES.items()}
    wide = [0.3, -0.5, 0.4, -0.6, 0.5, -0.4]
    found = explain.explain(run_in_turns(tmp_path / "wide", same, wide))
    assert found.largest is None
    assert "no single part's change can be told from chance" in explain_tables.step_line(found)
    told = explain.explain(run_in_turns(tmp_path / "h2d", {**same, "h2d": 1.1}, wide))
    assert abs(told.step_us["device"].delta) < abs(told.step_us["h2d"].delta)
    more = explain.explain(run_in_turns(tmp_path / "more", {**same, "h2d": 1.19, "device": 1.8}, wide))
    assert abs(more.step_us["device"].delta) > abs(more.step_us["h2d"].delta)
    assert more.largest == told.largest == "h2d"
    one = explain.explain(run_in_turns(tmp_path / "one", {**same, "h2d": 0.1}, [0.0]))
    assert one.largest is None
    assert "one trial can't tell which part changed" in explain_tables.step_line(one)


def test_where_turns_do_not_tell_it_phases_are_of_rounds_and_say_so(
    tmp_path: Path, found: explain.Explained
) -> None:
    assert (found.measured_in, found.why_rounds) == ("rounds", "this run took no turns")
    run = run_in_turns(tmp_path, {"device": 2.0}, [0.0, 0.0])
    for number in range(2):  # as an earlier version left them
        old = tables.read_table(run, number, "slices")
        kept = [name for name in old if not name.startswith(slices.PART)]
        tables.write_table(tables.table_path(run, number, "slices"), old[kept])
    fallen_back = explain.explain(run)
    assert fallen_back.measured_in == "rounds"
    assert fallen_back.step_us["interval"].delta == pytest.approx(-200, rel=0.05)
    line = explain_tables.step_line(fallen_back)
    assert line.startswith("In rounds, as turns do not tell it here")
    assert "the step may change by another share" in line


def test_the_mean_of_all_turns_is_explained_where_that_decides(tmp_path: Path) -> None:
    after = {name: 4 * share for name, share in SHARES.items()}
    run = run_in_turns(tmp_path, after, [0.0, 0.0])
    plan = read_manifest(run)
    by_mean = msgspec.structs.replace(plan.design, primary=SLICED_MEAN)
    write_manifest(run, msgspec.structs.replace(plan, design=by_mean))
    assert explain.explain(run).step_us["output"].after == pytest.approx(9000 / 5)


def test_a_step_that_is_mostly_unattributed_is_warned_of(found: explain.Explained) -> None:
    assert found.step_us["unattributed"].share_before > 0.03
    assert "of the before arm's step is in none of the engine's phases" in warned(found)[0]


def test_one_arm_alone_is_explained_without_a_change(tmp_path: Path) -> None:
    found = explain.explain(Path(stored(tmp_path, "a", plan=manifest(arms=1))))
    assert found.after is found.prediction is None
    assert found.step_us["device"].after is None
    assert {each.arm for each in found.tail} == {"before"}
    assert "Where a decode step goes" in pages.markdown_page(explain_tables.page(found))


def test_a_device_s_line_that_holds_more_is_called_so_wherever_it_is_named(found: explain.Explained) -> None:
    more = msgspec.structs.replace(found, device_holds="the model runner", largest="device")
    assert "the largest is in device and more: " in explain_tables.step_line(more)
    assert "% of it in device and more." in explain_tables.step_line(
        msgspec.structs.replace(more, after=None)
    )
    assert "| device and more |" in pages.markdown_page(explain_tables.page(more))


def test_the_ranks_of_a_model_are_shown_one_by_one_and_the_slowest_has_a_line(tmp_path: Path) -> None:
    """In the second arm alone: its other rank begins each step 0.2 ms late, and ends it as late."""
    plan = manifest()
    write_manifest(tmp_path, plan)
    for each in blocks(0.9):
        steps = each.tables["steps"]
        after = steps["arm"] == "after"
        late = {
            f"{name}.1": (steps[name] + by).where(after)
            for name, by in zip(ranks.DEVICE, (200_000, 200_000, 0), strict=True)
        }
        tables.write_block(tmp_path, each.number, {**each.tables, "steps": steps.assign(**late)})
    found = explain.explain(tmp_path)
    assert [(each.arm, each.rank) for each in found.ranks] == [("after", 0), ("after", 1)]
    first, second = found.ranks
    assert (first.exposed_host_us, second.exposed_host_us) == pytest.approx((2600, 2600), rel=0.01)
    assert (first.waiting_us, second.waiting_us) == pytest.approx((200, 0))
    slowest = found.step_us["slowest rank"]
    assert (slowest.before, slowest.after) == pytest.approx((0, 200))
    assert found.step_us["device"].after == pytest.approx(800)
    shown = pages.markdown_page(explain_tables.page(found))
    assert "| after | 1 |" in shown
    assert "waiting for the slowest rank" in shown


def test_every_form_says_the_same(run: Path, found: explain.Explained) -> None:
    shown = {}
    for form in ("table", "markdown", "json", "csv"):
        shown[form] = bench("explain", str(run), "--format", form).out
    told = json.loads(shown["json"])
    rows = {row["part"]: row for row in csv.DictReader(io.StringIO(shown["csv"]))}
    assert list(rows) == ["interval", *PARTS]
    assert float(rows["device"]["delta"]) == told["step_us"]["device"]["delta"]
    for form in ("table", "markdown"):
        for line in (found.headline, explain_tables.step_line(found)):
            assert line in " ".join(shown[form].split())
        for words in ("unattributed", "ttft p99 (few)", "No prediction", "interval"):
            assert words in shown[form], (form, words)


@pytest.mark.parametrize(
    ("recorder", "reason"), [(False, "it ran with recorder=off"), (True, "the engine e records none")]
)
def test_a_run_without_step_records_says_why_it_has_none(tmp_path: Path, recorder: bool, reason: str) -> None:
    plan = manifest(1, arms=1)
    arm = msgspec.structs.replace(plan.design.arms[0], options=api.EngineOptions(recorder=recorder))
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=(arm,)))
    write_manifest(tmp_path, plan)
    (block,) = blocks(1.0, 1)
    parts = block.only(["before"]).tables
    tables.write_block(tmp_path, 0, {name: parts[name] for name in ("requests", "rounds")})
    with pytest.raises(api.BadSetting, match=f"arm before has no step records to explain: {reason}"):
        explain.explain(tmp_path)
