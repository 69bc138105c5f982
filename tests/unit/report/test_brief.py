"""What a terminal shows of a comparison: what answers the question, on one screen; --all has the rest."""

from typing import Any

from msgspec.structs import replace

import overlap_bench
from overlap_bench.harness.analysis.plain import from_plain, to_plain
from overlap_bench.harness.analysis.result import Comparison, Counter, MetricRow, Result
from overlap_bench.harness.analysis.warnings import Severity, Told
from overlap_bench.harness.report import sections, tables
from overlap_bench.harness.report.page import Page
from tests.support import made_blocks
from tests.support.places import REFERENCE, ROOT

LINES, COLUMNS = 40, 100


def screen(found: Result, whole: bool = False) -> list[str]:
    return made_blocks.shown(found, COLUMNS, whole).splitlines()


def test_readme_shows_what_the_code_says_of_the_run_it_names() -> None:
    """Its warnings are stored by their fields: their sentences are those of today."""
    found = overlap_bench.load(REFERENCE / "runs" / "pinned-h2d-turns").result
    (only,) = found.comparisons
    assert {each.kind for each in only.warnings} == {"core_speed", "late_sends", "emulated"}
    assert not any(isinstance(each, Told) for each in only.warnings)
    sample = (ROOT / "README.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert sample.splitlines() == [line.rstrip() for line in screen(found)]


def page_of(**changes: Any) -> Page:
    found = made_blocks.result()
    comparison: Comparison = replace(found.comparisons[0], **changes)
    (page,) = sections.pages(replace(found, comparisons=[comparison]), whole=False)
    return page


def test_a_comparison_fits_on_a_screen_and_all_of_it_is_longer() -> None:
    found = made_blocks.result()
    assert len(screen(found)) <= LINES
    assert len(screen(found)) < len(screen(found, whole=True))
    assert "--all" in "\n".join(screen(found))


def test_counters_that_tell_the_arms_apart_are_shown_in_units_one_can_read() -> None:
    counters = {
        "gc": Counter(before=0.0001, after=0.0, unit="per step"),
        "equal": Counter(before=5.0, after=5.0, unit="per step"),
        "waited_ns": Counter(before=42_861_137.0, after=0.0, unit="per step"),
    }
    page = page_of(mechanism=counters)
    rows = {row[0]: row[1:] for row in page.tables[1].rows}
    assert rows["waited"] == ("42.86", "0", "ms per step")
    assert not {"gc", "equal", "waited_ns"} & rows.keys()


MANY = [Told(f"noise: {number}", weight=Severity.DESCRIBES) for number in range(4)]


def test_warnings_that_do_something_to_the_verdict_stand_below_it_and_the_others_are_counted() -> None:
    weighty = [Told(f"{number}", weight=severity) for number in range(4) for severity in reversed(Severity)]
    shown = page_of(warnings=[*MANY, *weighty])
    leading = [each.text for each in sorted(weighty, key=lambda each: each.severity) if each.leads]
    assert list(shown.lines[:8]) == [f"Warning: {text}" for text in leading]
    assert list(shown.warnings) == [
        "0",
        "1",
        "2",
        "3",
        "and 8 more: --all",
    ]  # first those of no known severity
    assert page_of(warnings=MANY).warnings == ["noise: 0", "noise: 1", "noise: 2", "and 1 more: --all"]


def test_of_warnings_that_were_stored_as_texts_none_is_hidden() -> None:
    found = made_blocks.result()
    many = replace(found, comparisons=[replace(found.comparisons[0], warnings=MANY)])
    (page,) = sections.pages(from_plain(to_plain(many), Result), whole=False)
    assert page.warnings == [each.text for each in MANY]


def test_an_undecided_run_says_the_way_out_first_and_then_what_it_found_all_the_same() -> None:
    counters = {"copies": Counter(before=6.0, after=0.0, unit="per step")}
    found = made_blocks.result(1.0, noise=0.05)
    undecided = replace(found.comparisons[0], mechanism=counters)
    (page,) = sections.pages(replace(found, comparisons=[undecided]), whole=False)
    assert page.lines[0].startswith(
        "Undecided: these trials scatter too much to show a change of 1%; trials added to"
    )
    assert page.lines[1] == "Descriptive, no verdict: copies 6 → 0 per step."
    assert not any("run again with" in line for line in page.warnings)
    assert not any("Descriptive" in line for line in page_of(mechanism=counters).lines)


def test_phases_by_turns_stand_in_the_place_of_those_in_rounds() -> None:
    found = made_blocks.result(1.0, noise=0.05)
    (only,) = found.comparisons
    row = MetricRow(
        unit="us", better="lower", before=100.0, after=90.0, change=-0.1, ci_low=-0.12, ci_high=-0.08
    )
    small = replace(row, before=10.0, after=8.0)
    phases = {
        "phase_append_us": replace(row, change=None, delta=-10.0, ci_low=-12.0, ci_high=-8.0),
        "decode_phase_output_us": small,
        "decode_phase_append_us": row,
    }
    with_phases = replace(only, metrics={**only.metrics, **phases})
    page = sections.page(found, with_phases, whole=False)
    assert page.lines[1].startswith("Descriptive, in turns, no verdict: decode_phase_append_us −10.0%")
    assert " phase_append_us " not in page.lines[1]
    assert page.lines[1].index("append") < page.lines[1].index("output")  # by what a step has of it


def test_an_arm_against_itself_says_what_it_could_detect_and_a_run_that_ended_early_why() -> None:
    found = made_blocks.result(1.0)
    comparison = found.comparisons[0]
    equal = replace(found, comparisons=[replace(comparison, after=comparison.before)])
    assert "would be detected in 4 of 5 such runs" in "\n".join(screen(equal))
    assert "Stopped" not in "\n".join(screen(found))
    own = replace(comparison, after=comparison.before)
    two_nodes = replace(own.metrics[own.primary], counted=2)  # of six trials, where nodes disagree
    of_nodes = replace(own, metrics={**own.metrics, own.primary: two_nodes})
    assert tables.detectable(of_nodes) != tables.detectable(own)
    early = replace(found, stopped_because="decided at 6 of at most 20 trials")
    assert "Stopped: decided at 6" in "\n".join(screen(early))
