"""What is printed of a comparison: the sentence, the tables, the csv."""

import csv
import io
import re

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis import comparison, words
from overlap_bench.harness.analysis.decision import ONE_BOOT
from overlap_bench.harness.analysis.outputs import why_weak
from overlap_bench.harness.analysis.result import Comparison, Failures, Outputs, Patched
from overlap_bench.harness.cli import printing
from overlap_bench.harness.plan.design import Arm, Ref
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.report import formats, page, sections, tables
from overlap_bench.harness.workload.workload import Workload
from tests.support.made_blocks import REQUESTS, blocks, manifest, result, warned


def test_an_interval_has_signs_in_a_sentence_only_where_it_holds_zero() -> None:
    sure, unsure = result(0.9, noise=0.001), result(0.995, noise=0.05)
    sentence = words.conclusion(sure.device, sure.comparisons[0])
    assert re.search(
        r": faster\. TPOT p50 is 10\.\d% lower \[\d+\.\d%, \d+\.\d%\]: \d\S* → \d\S* ms \(6 trials, ",
        sentence,
    )
    assert re.search(r"\[−\d\S*%, \+\d\S*%\]", words.conclusion(unsure.device, unsure.comparisons[0]))


def test_a_primary_that_is_zero_somewhere_is_told_in_its_unit() -> None:
    found = result(0.9, manifest(goodput={"tpot": 3.8}, primary="goodput_req_s"))
    only = found.comparisons[0]
    sentence = words.conclusion(found.device, only)
    assert f"{only.variant}: better. goodput_req_s is " in sentence
    assert " req/s higher [" in sentence
    assert not any("fresh run" in line for line in warned(only))


def test_failed_requests_are_shown_with_their_first_causes() -> None:
    assert "Failed requests" not in formats.to_markdown(result())
    failing = blocks(1.0)
    after = failing[2].tables["requests"]
    mine = after.index[after["arm"] == "after"]
    for index, cause in zip(mine, ("HTTP 500", "timed out", "HTTP 500", "cut", "refused"), strict=False):
        after.loc[index, "error"] = cause
    found = comparison.result(manifest(), failing)
    asked = 6 * REQUESTS
    assert found.comparisons[0].failures["before"] == Failures(failed=0, requests=asked, causes={})
    shown = formats.to_markdown(found)
    assert f"| after | 5 | {asked} | 2 × HTTP 500; 1 × timed out; 1 × cut; and 1 other causes |" in shown
    assert f"| before | 0 | {asked} |  |" in shown


def test_a_server_at_a_url_is_one_boot_and_undecided() -> None:
    arms = tuple(
        Arm(name=name, engine="e", options=api.EngineOptions(), toggles={"url": name})
        for name in ("before", "after")
    )
    plan = manifest(blocks=1)
    plan = msgspec.structs.replace(plan, design=msgspec.structs.replace(plan.design, arms=arms))
    found = result(plan=plan)
    row = found.comparisons[0].metrics["tpot_ms_p50"]
    assert row.verdict == "undecided: one boot per side"
    assert "undecided: one boot per side." in words.conclusion(found.device, found.comparisons[0])


def test_arms_are_told_apart_by_what_differs() -> None:
    (found,) = result().comparisons
    assert tables.changed_settings(found.before, found.after) == "before: h2d=pageable; after: h2d=pinned"
    here = msgspec.structs.replace(found.before, toggles={})
    base = msgspec.structs.replace(here, ref=Ref(repository="", name="base", commit="0123456789abcdef"))
    assert tables.changed_settings(base, here) == "before: ref=base (0123456789); after: ref=as installed"
    files = tuple(f"vllm/{number}.py" for number in range(9))  # a release has a thousand
    changed = msgspec.structs.replace(here, patch=Patched(file="a.diff", sha256="", files=files, left_out=()))
    told = tables.changed_settings(here, changed)
    assert told.endswith("after: patch=a.diff (vllm/0.py, vllm/1.py, vllm/2.py, and 6 more)")


def of_variant(name: str) -> Comparison:
    """A result of its two arms."""
    variant = load_variants()[name]
    (only,) = result(0.9).comparisons
    before, after = (
        msgspec.structs.replace(only.before, engine=variant.engine, toggles=toggles)
        for toggles in (variant.before, variant.after)
    )
    return msgspec.structs.replace(only, before=before, after=after)


@pytest.mark.parametrize(
    ("ends", "why"),
    [((None, None), "one trial has no interval"), ((-0.1, 0.1), "every interval includes zero")],
)
def test_why_a_claim_is_not_confirmed_is_said(ends: tuple[float | None, ...], why: str) -> None:
    only = of_variant("pinned-h2d")
    row = msgspec.structs.replace(only.metrics["tpot_ms_p50"], ci_low=ends[0], ci_high=ends[1])
    said = sections.claimed(msgspec.structs.replace(only, metrics={"tpot_ms_p50": row}))
    assert said.endswith(f"not confirmed, as {why}.")


def test_no_source_speaks_of_another_change() -> None:
    assert sections.claimed(of_variant("packed-h2d")) is None  # its source claims nothing
    assert sections.claimed(result(0.9).comparisons[0]) is None  # another engine's
    only = of_variant("pinned-h2d")
    for after in (
        only.before,
        msgspec.structs.replace(only.after, toggles={**only.after.toggles, "gc": "frozen"}),
        msgspec.structs.replace(only.after, options={**only.after.options, "seed": 1}),
    ):
        assert sections.claimed(msgspec.structs.replace(only, after=after)) is None


def test_the_change_of_the_step_is_told_by_its_parts() -> None:
    found = result(0.9)
    (only,) = found.comparisons
    parts = tables.step_parts(only)
    assert parts is not None
    told = re.fullmatch(
        r"The decode step's −10\.\d% in rounds is −10\.\d% \[.*\] from host time that the device does not "
        r"hide \(round_step_ms_same_device: the step, had the device taken as long in both\), and "
        r"\+0\.00% \[.*\] from device time \(round_step_ms_same_host\)\.",
        parts,
    )
    assert told, parts  # the device takes 1 ms of each step there, whatever the step
    assert parts in sections.page(found, only).lines
    assert "[" not in str(tables.step_parts(result(0.9, manifest(1)).comparisons[0]))  # of one block
    without = msgspec.structs.replace(only, metrics={"tpot_ms_p50": only.metrics["tpot_ms_p50"]})
    assert tables.step_parts(without) is None


@pytest.mark.parametrize(
    ("found", "workload", "said"),
    [
        (
            Outputs(compared=80, identical=80, near_ties=None, distinct=1),
            Workload(),
            "asked the same prompt; try",
        ),
        (
            Outputs(compared=80, identical=80, near_ties=None, distinct=1),
            None,
            "one text; try --prompts english",
        ),
        (
            Outputs(compared=80, identical=80, near_ties=None, distinct=20),
            Workload(prompts="a.txt"),
            "of 20 texts;",
        ),
        (
            Outputs(compared=80, identical=80, near_ties=None, distinct=2),
            Workload(prompts="openings"),
            "all are one of 2 texts, though prompts differ; try a higher --max-new-tokens",
        ),
        (
            Outputs(compared=80, identical=80, near_ties=None, distinct=3),
            Workload(unique_prompts=True),
            "though prompts differ",
        ),
        (Outputs(compared=1, identical=1, near_ties=None, distinct=1), Workload(), "the same prompt"),
        (Outputs(compared=80, identical=80, near_ties=None, distinct=21), Workload(), ""),
        (Outputs(compared=9000, identical=9000, near_ties=None, distinct=32), Workload(), ""),
        (Outputs(compared=80, identical=79, near_ties=1, distinct=1), Workload(), ""),  # there is more to say
        (Outputs(compared=0, identical=0, near_ties=None, distinct=0), Workload(), ""),
        (Outputs(compared=80, identical=80, near_ties=None), None, ""),  # of an old run
    ],
)
def test_equal_outputs_of_few_texts_are_called_a_weak_check(
    found: Outputs, workload: Workload | None, said: str
) -> None:
    (only,) = result().comparisons
    told = msgspec.structs.replace(found, weak=why_weak(found, workload))
    line, stored = (
        tables.outputs_line(msgspec.structs.replace(only, outputs=each)) or "" for each in (told, found)
    )
    assert ("A weak check: " in line) == bool(said)
    assert said in line
    assert stored.count("A weak check") == bool(said)  # it says less


def test_the_primary_comes_first_and_judged_ones_next() -> None:
    only = result(plan=manifest(secondaries=("latency_ms_p50",))).comparisons[0]
    names = [row[0] for row in tables.metric_table(only).rows]
    assert names[:2] == ["tpot_ms_p50", "latency_ms_p50"]
    assert len(names) == len(set(names))


def test_one_boot_a_side_is_undecided_in_one_word() -> None:
    found = result(0.9)
    (one,) = found.comparisons
    alone = msgspec.structs.replace(one, verdict=ONE_BOOT)
    assert formats.verdict_of(msgspec.structs.replace(found, comparisons=[alone])) == "undecided"
    assert formats.verdict_of(msgspec.structs.replace(found, comparisons=[one, one])) is None


def test_csv_has_every_metric_unrounded() -> None:
    found = result()
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(found))))
    of_metrics = found.comparisons[0].metrics
    assert {row["metric"] for row in rows} == set(of_metrics)
    assert {row["confidence"] for row in rows} == {str(found.comparisons[0].confidence)}
    tpot = next(row for row in rows if row["metric"] == "tpot_ms_p50")
    assert float(tpot["change"]) == of_metrics["tpot_ms_p50"].change
    assert tpot["floor"] == ""


def test_a_line_that_goes_to_a_file_stays_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    found = result(0.9)
    printing.show(found, printing.Format.TABLE)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == words.conclusion(found.device, found.comparisons[0])
    assert len(first) > 60
    assert max(len(line) for line in rest if line.startswith(" ")) <= 60  # tables keep to the width


def test_a_cell_of_several_lines_stays_in_its_row_of_markdown() -> None:
    table = page.Table("t", ("a", "b"), (("x\ny|z", "2"),), "")
    assert "| x y\\|z | 2 |" in page.markdown_table(table)
