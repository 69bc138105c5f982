"""vLLM's argued changes, judged: from the cells that were measured to the page, the claims and README."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from experiments.common import judgement
from experiments.common.judgement import Cell, Judged, Judgement, Row, cell_name
from experiments.validation import vllm_judged, vllm_toggles
from overlap_bench.harness.analysis.catalogue import Catalogue
from overlap_bench.harness.analysis.sensitivity import FILE, Phase, Sensitivity
from overlap_bench.harness.metrics.definitions import SLICED, phase_in_turns
from overlap_bench.harness.report.page import markdown_page
from tests.support.places import REFERENCE, ROOT

Found = dict[str, dict[str, Any]]


def row(change: float, half: float = 0.001, before: float = 1000, **more: Any) -> dict[str, Any]:
    ends = {"ci_low": change - half, "ci_high": change + half, "verdict": None}
    return {"before": before, "after": before * (1 + change), "change": change, **ends, **more}


def run(phase: float | None, step: float | None, half: float = 0.001, ms: float = 10) -> dict[str, Any]:
    """What vllm_toggles keeps of a variant's run, its phase of 1,000 us, its step of so many ms."""
    rows = {"phase": (phase, 1000.0), "step": (step, ms)}
    found = {name: row(each, half, before) for name, (each, before) in rows.items() if each is not None}
    return {**found, "outputs": {"compared": 8, "identical": 8, "near_ties": 0}}


def sensitivity_at(folder: Path, cell: str, step_us: float, slack: float) -> None:
    """A slope of 1 in `append`, beyond that slack; an earlier run of it says something else."""
    for name, us in (("1-early", 1.0), ("2-late", step_us)):
        found = Sensitivity(
            schema_version=1, run=name, engine="vllm", device="paced", model="m", toggles={}, batch=64,
            step_us=us, trials=6, phases=[Phase(
                phase="append", us=1000, slope=1, slope_low=0.9, slope_high=1.1, slack_us=slack,
                slack_low=slack, slack_high=slack, gain_most=0 if slack else 1000, points=[(100, 100)],
            )],
        )  # fmt: skip
        where = judgement.run_folder(folder, cell) / name
        where.mkdir(parents=True)
        (where / FILE).write_bytes(msgspec.json.encode(found))


@pytest.fixture
def found(tmp_path: Path) -> Judgement:
    """vllm-update shortens its phase of 1,000 us by 20% at 64: 2% of a step of 10 ms, 4% of 5, .4% of 50."""
    for at, step_us in (("k/2", 5_000), ("k", 10_000), ("2k", 50_000)):
        sensitivity_at(tmp_path, cell_name("slope", 64, "off", at), step_us, 0)
        sensitivity_at(tmp_path, cell_name("slope", 64, "on", at), step_us, 4_000)
    sensitivity_at(tmp_path, "slope 1 off", 10_000, 0)
    cells: Found = {
        "slope 64 off": {"step_us": 10_000, "phases": {"append": [1000, 1, 0.9, 1.1]}},
        "vllm-update 1 off": run(0.0, None),
        "vllm-update 64 off": run(-0.2, -0.021),
        "vllm-update 256 off": run(-0.3, -0.05),
        "vllm-update 64 on": run(-0.2, -0.0001, half=0.00005),
        "vllm-async-scheduling 64 off": run(None, -0.25),
        "vllm-heap 64 off": {"failed": 4},
        "vllm-flat-logprobs 256 off": run(0.001, 0.0004),
    }
    return Judgement(
        date="2026-11-29", commits=["abc"], machine="a cpu", pace="a-pace*k",
        changes=judgement.judged(cells, tmp_path),
    )  # fmt: skip


def of(found: Judgement, name: str) -> dict[str, str]:
    """The row of a change on the page."""
    table = vllm_judged.page(found).tables[0]
    rows = [dict(zip(table.columns, each, strict=True)) for each in table.rows]
    (mine,) = [each for each in rows if each["change"].split()[0] == name]
    return mine


def test_a_change_has_one_row_that_says_what_who_merges_asks(found: Judgement) -> None:
    mine = of(found, "vllm-update")
    assert mine["change"] == "vllm-update (our rewriting)"
    assert mine["the source says"].startswith(
        "vLLM pull request 46112 (closed): .142 -> .129 ms at batch 128"
    )
    assert mine["its own phase"] == "append at 256: −30.0% [−30.1%, −29.9%]"
    assert mine["a step at 1"] == "(+0.00%) / –"
    assert mine["a step at 16"] == "–"
    assert mine["a step at 64"] == "−2.1% / −0.01%"
    assert mine["a step at 256"] == "−5.0% / –"
    assert mine["starts to matter"] == "from 64 on; async: nowhere up to 64"
    assert mine["depends on the host"] == "yes: −4.0%, −2.1%, −0.40%; async: no: +0.00%, −0.01%, +0.00%"
    other = of(found, "vllm-async-scheduling")
    assert other["its own phase"] == "no single one"
    assert (other["a step at 64"], other["starts to matter"]) == ("−25.0% / –", "at 64")
    assert of(found, "vllm-remove-all")["its own phase"] == "append: –"


def test_the_page_says_how_many_matter_and_whether_it_foretold_them(found: Judgement) -> None:
    page = vllm_judged.page(found)
    of = len(judgement.variants())
    assert page.conclusion.startswith(
        f"3 of {of} argued changes to vLLM's host code judged at an H100's pace: "
    )
    assert "2 change a decode step by 1% or more at some batch" in page.conclusion
    assert page.conclusion.endswith("with async scheduling 0 of the 1 that were tried.")
    # With async nothing is foretold, and −0.01% was seen.
    assert "overlap in 1 of 2 cells, of which 2 have an effect" in page.lines[3]
    assert page.lines[4].startswith("Outputs: 48 of 48 identical in both arms.")
    assert page.warnings == ["vllm-heap, batch 64, async off: not measured, bench ended with 4"]
    known = {each[0]: each[-1].partition(":")[0] for each in page.tables[1].rows}
    assert known == {
        "vllm-update, its phase at 256": "more here",
        "vllm-flat-logprobs, a step at 256": "the interval holds it, and no change",
    }
    assert vllm_judged.readme(found).endswith(
        "The most: `vllm-async-scheduling`, −25.0% at batch 64. "
        "[Change by change](results/reference/proofs/vllm_toggles.md)."
    )
    browser = vllm_judged.for_browsers(found)
    assert "<h2>Change by change</h2>" in browser
    assert "−2.1% / −0.01%" in browser


def test_what_is_hidden_is_not_felt_however_large_its_slope_is_beyond_the_slack(found: Judgement) -> None:
    (update,) = [each for each in found.changes if each.name == "vllm-update"]
    off, on = (each for mode in ("off", "on") for each in update.of(mode) if each.batch == 64)
    assert off.foretold is not None
    assert off.foretold.change == pytest.approx(-0.02)
    assert off.foretold.ends == pytest.approx((-0.201 * 1.1 / 10, -0.199 * 0.9 / 10))
    assert on.foretold == Row(change=0, ci_low=0, ci_high=0)


def test_a_run_of_a_slower_day_than_the_slopes_is_a_share_of_its_own_step(tmp_path: Path) -> None:
    sensitivity_at(tmp_path, "slope 64 off", 10_000, 0)
    changes = judgement.judged({"vllm-update 64 off": run(-0.2, -0.01, ms=20)}, tmp_path)
    (update,) = [each for each in changes if each.name == "vllm-update"]
    (cell,) = [each for each in update.of("off") if each.batch == 64]
    assert cell.foretold is not None
    assert cell.foretold.change == pytest.approx(-0.01)


def test_what_a_step_feels_is_the_sum_of_its_phases() -> None:
    phase = Phase(
        phase="append", us=1000, slope=1, slope_low=0.9, slope_high=1.1, slack_us=0, slack_low=0,
        slack_high=0, gain_most=1000, points=[(100, 100)],
    )  # fmt: skip
    other = msgspec.structs.replace(phase, phase="output", slope=0.5, slope_low=0.5, slope_high=0.5)
    rows = {"append": row(-0.2, 0.0), "output": row(-0.1, 0.01), "send": row(-0.5)}
    changes = {name: msgspec.convert(each, Row) for name, each in rows.items()}
    found = judgement.foretold(changes, [phase, other], 10_000)
    assert found.change == pytest.approx(-0.02 - 0.005)
    half = (0.002**2 + 0.0005**2) ** 0.5
    assert found.ends == pytest.approx((-0.025 - half, -0.025 + half))


def test_nothing_is_expected_of_a_change_of_no_phase_and_the_page_says_what_is_added_up(
    tmp_path: Path,
) -> None:
    sensitivity_at(tmp_path, "slope 64 off", 10_000, 0)
    of_all = {"phases": {"append": row(-0.2), "output": row(-0.1)}, "trials": 6}
    cells = {
        "vllm-async-scheduling 64 off": {**run(None, -0.25), **of_all},
        "vllm-update 64 off": {**run(-0.2, -0.02), **of_all},
    }
    found = Judgement(date="", commits=[], machine="", pace="", changes=judgement.judged(cells, tmp_path))
    known = {each.name: cell for each, cell in found.cells if cell.whole is not None}
    assert known["vllm-async-scheduling"].foretold is None
    assert known["vllm-update"].foretold is not None
    assert (known["vllm-update"].added, known["vllm-update"].trials) == (2, 6)
    assert "such cells" not in vllm_judged.page(found).lines[1]  # every one was run whole
    alone = msgspec.structs.replace(known["vllm-update"], whole=None)
    expected = [alone, alone, msgspec.structs.replace(alone, added=1)]
    changes = [
        msgspec.structs.replace(each, cells=expected if each.name == "vllm-update" else [])
        for each in found.changes
    ]
    page = vllm_judged.page(msgspec.structs.replace(found, changes=changes))
    assert page.lines[1].endswith("costs a step, in 2 of 3 such cells the sum of all phases.")


def test_what_was_measured_before_stays_until_it_is_measured_anew(found: Judgement) -> None:
    def with_cells(*cells: Cell) -> Judgement:
        return msgspec.structs.replace(
            found, commits=["abc"], changes=[msgspec.structs.replace(found.changes[0], cells=[*cells])]
        )

    def whole(change: float) -> Row:
        return Row(change=change)

    before = with_cells(Cell(batch=1, mode="off", whole=whole(-0.1)), Cell(batch=16, mode="off"))
    now = with_cells(
        Cell(batch=1, mode="off", foretold=whole(-0.2)), Cell(batch=16, mode="off", whole=whole(-0.3))
    )
    cells = vllm_judged.merged(before, msgspec.structs.replace(now, commits=["def"])).changes[0].cells
    assert [each.step and each.step.change for each in cells] == [-0.1, -0.3]
    assert vllm_judged.merged(before, now).commits == ["abc"]
    other = vllm_judged.merged(before, msgspec.structs.replace(now, machine="another cpu"))
    assert other.machine == "a cpu"
    assert [each.machine for each in other.changes[0].cells] == ["", "another cpu"]
    assert judgement.where(other.changes[0].cells[1]) == "batch 16, async off, on another cpu"


def test_two_hosts_with_two_answers_depend_on_it_whatever_a_third_says() -> None:
    def said(*changes: float) -> str:
        cells = [
            Cell(
                batch=64, mode="off", at=at, whole=Row(change=each, ci_low=each - 0.002, ci_high=each + 0.002)
            )
            for at, each in zip(judgement.HOSTS, changes, strict=True)
        ]
        return judgement.depends_on_host(Judged(name="a", title="", source="", says="", cells=cells), "off")

    assert said(0.015, 0.01, 0.005) == "yes: +1.5%, +1.0%, +0.50%"
    assert said(0.015, 0.01, 0.02) == "not settled: +1.5%, +1.0%, +2.0%"
    assert said(0.03, 0.02, 0.015) == "no: +3.0%, +2.0%, +1.5%"


def test_a_phase_that_was_measured_anew_is_that_of_all_cells_that_are_expected_by_it(
    found: Judgement,
) -> None:
    def with_cells(*cells: Cell) -> Judgement:
        changes = [msgspec.structs.replace(found.changes[0], cells=[*cells])]
        return msgspec.structs.replace(found, changes=changes)

    old, new, hidden = Row(change=-0.2), Row(change=-0.1), Row(change=0, ci_low=0, ci_high=0)
    before = with_cells(
        Cell(batch=64, mode="off", phase=old, foretold=old, whole=old),
        Cell(batch=64, mode="on", phase=old, foretold=hidden),
        Cell(batch=64, mode="off", at="2k", phase=old, foretold=old),
    )
    places = [Cell(batch=64, mode="on"), Cell(batch=64, mode="off", at="2k")]
    now = with_cells(Cell(batch=64, mode="off", phase=new, whole=new), *places)
    here, on, other = vllm_judged.merged(before, msgspec.structs.replace(now, machine="b")).changes[0].cells
    assert [each.foretold for each in (here, on, other)] == [None, hidden, None]
    assert {(each.phase, each.machine) for each in (here, on, other)} == {(new, "b")}


def test_no_batch_is_tried_at_which_both_arms_do_the_same() -> None:
    known = judgement.variants()
    for name, batches in (("vllm-output-chunk", {256}), ("vllm-remove-all", {16, 64, 256})):
        assert {place[0] for place in judgement.places(known[name])} == batches
    for name, tokens in (("vllm-remove-all", "uniform:32:96"), ("vllm-heap", "64")):  # 64 all end in one step
        words = vllm_toggles.command(f"{name} 64 off", "python", Path("out"))
        assert words[words.index("--max-new-tokens") + 1] == tokens


def test_a_step_is_what_the_variant_decides_by_or_that_of_turns() -> None:
    both = {"metrics": {SLICED: {}, "decode_step_ms_untrimmed": {}}, "primary": SLICED}
    assert vllm_toggles.step_metric("vllm-heap", both) == "decode_step_ms_untrimmed"
    assert vllm_toggles.step_metric("vllm-update", both) == SLICED
    drafts = {"metrics": {"tpot_ms_mean": {}}, "primary": "tpot_ms_mean"}
    assert vllm_toggles.step_metric("vllm-async-speculation", drafts) == "tpot_ms_mean"


def test_what_was_expected_stays_beside_what_was_run_whole_since() -> None:
    expected = Cell(batch=64, mode="on", foretold=Row(change=-0.01), added=3)
    run = Cell(batch=64, mode="on", whole=Row(change=-0.02))
    kept = vllm_judged._better(expected, run)
    assert (kept.whole, kept.foretold, kept.added) == (run.whole, expected.foretold, 3)
    again = Cell(batch=64, mode="on", whole=run.whole, foretold=Row(change=-0.03))
    assert vllm_judged._better(expected, again) == again
    assert vllm_judged._better(run, expected) == run


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({}, "–"),
        ({1: -0.05, 16: -0.03, 64: -0.02}, "at 1, 16 and 64"),
        ({1: -0.001, 16: -0.03, 64: 0.02}, "from 16 on"),
        ({1: -0.03, 16: -0.001, 64: -0.02}, "at 1 and 64"),
        ({1: -0.001, 16: -0.01, 64: -0.02}, "at 64; not settled at 16"),
        ({1: -0.03, 16: -0.01}, "at 1; not settled at 16"),
        ({1: -0.001, 16: 0.002}, "nowhere up to 16"),
        ({1: -0.001, 16: -0.01}, "not settled at 16"),
        ({16: 0.02}, "at 16"),
    ],
)
def test_where_it_starts_to_matter_is_where_the_whole_interval_does(
    steps: dict[int, float], said: str
) -> None:
    cells = [
        Cell(batch=batch, mode="off", whole=Row(change=each, ci_low=each - 0.002, ci_high=each + 0.002))
        for batch, each in steps.items()
    ]
    assert judgement.starts(Judged(name="a", title="", source="", says="", cells=cells), "off") == said
    open_ended = [Cell(batch=1, mode="off", whole=Row(change=-0.5))]  # one trial has no interval
    assert judgement.starts(Judged(name="a", title="", source="", says="", cells=open_ended), "off") == (
        "not settled at 1"
    )


def test_claims_get_the_phase_and_the_step_and_a_rewriting_no_verdict_on_its_source(found: Judgement) -> None:
    shipped = (ROOT / "harness" / "analysis" / "claims.json").read_text()
    text = vllm_judged.claims(found, shipped)
    assert vllm_judged.claims(found, text) == text
    before, after = (msgspec.json.decode(each, type=Catalogue).entries for each in (shipped, text))
    mine = [each for each in after if each.found_in == vllm_judged.PAGE]
    assert [each for each in after if each not in mine] == [
        each for each in before if each.found_in != vllm_judged.PAGE
    ]
    update = [each for each in mine if each.claim == "vllm-update"]
    assert [(each.metric, each.batch, each.change) for each in update] == [
        (phase_in_turns("append"), 256, -0.3),
        (SLICED, 64, -0.021),
    ]
    assert update[0].verdict == "descriptive; our rewriting, none on the source's own code"
    assert (update[1].device, update[1].step_ms) == ("paced: a-pace*k", 10)


def test_cells_are_commands_and_those_of_earlier_calls_keep_their_names() -> None:
    names = list(vllm_toggles.wanted())
    assert len({*names}) == len(names)
    assert names[0] == "slope 1 off"
    assert vllm_toggles.left(["a", "b", "c"], {"a": {"failed": 2}, "b": {}}) == ["c", "a"]
    assert {
        "vllm-update 64 off",
        "vllm-update 64 on",
        "slope 64 on 2k",
        "vllm-async-scheduling 64 off k/2",
    } <= {*names}
    for name, pace in (("slope 64 on k/2", "llama3-8b-h100*k/2"), ("vllm-heap 16 off", "llama3-8b-h100*k")):
        words = vllm_toggles.command(name, "python", Path("out"))
        assert words[words.index("--pace") + 1] == pace
    assert judgement.run_folder(Path("kept"), "slope 64 on k/2") == Path("kept/runs/slope-64-on-k_2")
    assert judgement.run_folder(Path("kept"), "slope 64 on") == Path("kept/runs/slope-64-on")


def test_what_is_published_is_what_its_file_says() -> None:
    """python -m experiments.validation.vllm_judged"""
    found, place = vllm_judged.read(), REFERENCE / vllm_judged.PAGE
    assert place.read_text() == markdown_page(vllm_judged.page(found))
    assert place.with_suffix(".html").read_text() == vllm_judged.for_browsers(found)
    shipped = (ROOT / "harness" / "analysis" / "claims.json").read_text()
    mine, kept = (json.loads(each)["entries"] for each in (vllm_judged.claims(found, shipped), shipped))
    assert sorted(mine, key=repr) == sorted(kept, key=repr)
    if any(cell.whole for _, cell in found.cells):
        assert f"(results/reference/{vllm_judged.PAGE})" in (ROOT / "README.md").read_text()
    assert json.loads(vllm_judged.SOURCE.read_text())["changes"]
