"""`bench explain` on stored runs: what is printed, in every form, and what it refuses in one line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from engines import api
from harness.analysis import explain
from harness.analysis.result import NoPrediction, to_plain
from harness.metrics import ranks
from harness.metrics.attribution import PARTS
from harness.report import explain_tables
from harness.report import page as pages
from harness.store import tables
from harness.store.manifest import write_manifest
from tests.support.bench_command import last_line
from tests.support.in_process import bench
from tests.support.made_blocks import blocks, manifest, warned
from tests.support.made_runs import stored

TOP = {
    "schema_version", "run", "device", "variant", "before", "after", "blocks", "confidence", "intervals",
    "step_us", "ranks", "tail", "prediction", "warnings",
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


def test_a_step_that_is_mostly_unattributed_is_warned_of(found: explain.Explained) -> None:
    assert found.step_us["unattributed"].share_before > 0.03
    assert "of the before arm's step is unattributed" in warned(found)[0]


def test_one_arm_alone_is_explained_without_a_change(tmp_path: Path) -> None:
    found = explain.explain(Path(stored(tmp_path, "a", plan=manifest(arms=1))))
    assert found.after is found.prediction is None
    assert found.step_us["device"].after is None
    assert {each.arm for each in found.tail} == {"before"}
    assert "Where a decode step goes" in pages.markdown_page(explain_tables.page(found))


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


def test_models_of_one_device_have_no_table_of_ranks(found: explain.Explained) -> None:
    assert found.ranks == []
    assert "slowest rank" not in pages.markdown_page(explain_tables.page(found))


def test_every_form_says_the_same(
    run: Path, found: explain.Explained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for form in ("table", "markdown", "json", "csv"):
        assert bench(monkeypatch, "explain", str(run), "--format", form) == 0
        shown[form] = capsys.readouterr().out
    told = json.loads(shown["json"])
    rows = {row["part"]: row for row in csv.DictReader(io.StringIO(shown["csv"]))}
    assert list(rows) == ["interval", *PARTS]
    assert float(rows["device"]["delta"]) == told["step_us"]["device"]["delta"]
    conclusion = explain_tables.conclusion(found)
    for form in ("table", "markdown"):
        assert conclusion.split(";")[0] in " ".join(shown[form].split())
        for words in ("unattributed", "ttft p99 (few)", "No prediction", "interval"):
            assert words in shown[form], (form, words)


def test_sixty_columns_break_no_word(found: explain.Explained) -> None:
    page = explain_tables.page(found)
    text = io.StringIO()
    Console(file=text, width=60).print(*pages.terminal_page(page, 60), sep="\n")
    shown = set(text.getvalue().split())
    for table in page.tables:
        assert {word for row in table.rows for cell in row for word in cell.split()} <= shown, table.title


def test_an_unfinished_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path, "a", 0.9, count=4)
    assert bench(monkeypatch, "explain", run) == 2
    assert "is not finished: 4 of 6 blocks" in last_line(capsys.readouterr().err)


def test_a_run_folder_that_was_cut_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(stored(tmp_path, "a", 0.9))
    path = tables.table_path(run, 2, "steps")
    path.write_bytes(path.read_bytes()[:100])
    assert bench(monkeypatch, "explain", str(run)) == 2
    assert "steps.parquet is damaged or was edited" in last_line(capsys.readouterr().err)
    assert bench(monkeypatch, "explain", str(tmp_path / "nowhere")) == 2
    assert "is not a run folder" in last_line(capsys.readouterr().err)


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
