"""One list of sections: what stands in it is on the screen, in markdown and on the web page. Every kind of
result has a module that shows it."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature

import pytest

import overlap_bench
from overlap_bench.harness.analysis.result import Comparison, Result
from overlap_bench.harness.report import formats, html, sections
from overlap_bench.harness.report.page import Table
from overlap_bench.harness.report.sections import Section
from tests.support import made_blocks
from tests.support.made_blocks import manifest, shown
from tests.support.places import REFERENCE

More = Callable[..., None]


def line(_: Comparison) -> str:
    return "A line of mine."


def table(_: Comparison) -> Table:
    return Table("A table of mine", ("one", "two"), (("cell 1", "cell 2"),), "a note", about="What it is")


def nothing(_: Comparison) -> None:
    return None


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> More:
    return lambda *found: monkeypatch.setattr(sections, "SECTIONS", (*sections.SECTIONS, *found))


def brief(found: Result, width: int = 120) -> str:
    return shown(found, width, whole=False)


def test_a_section_is_shown_wherever_a_result_is(more: More) -> None:
    more(Section(line, line), Section(table), Section(nothing, nothing))
    run = overlap_bench.load(REFERENCE / "runs" / "overlap")
    everywhere = (
        shown(run.result, 120),
        formats.to_markdown(run.result),
        html.to_html(run),
        html.to_markdown(run),
    )
    for text in everywhere:
        assert text.count("A line of mine.") == text.count("A table of mine") == text.count("cell 2") == 1
    assert "What it is" in everywhere[2]
    assert "A line of mine." in brief(run.result)
    assert "A table of mine" not in brief(run.result)


def test_what_the_first_screen_says_in_fewer_words_stands_in_the_place_of_the_whole(more: More) -> None:
    more(Section(table, line))
    found = made_blocks.result()
    assert "A line of mine." in brief(found)
    assert "A table of mine" not in brief(found)
    assert "A line of mine." not in formats.to_markdown(found)


def test_each_section_can_do_without_what_a_result_may_lack() -> None:
    """One arm alone; one trial."""
    for plan in (manifest(2, arms=1), manifest(1)):
        (only,) = made_blocks.result(plan=plan).comparisons
        for each in sections.SECTIONS:
            for say in filter(None, (each.whole, each.brief)):
                assert isinstance(say(only), str | Table | None)


@pytest.mark.parametrize("kind", formats.FORMS)
def test_every_kind_of_result_has_a_module_that_shows_it(kind: str) -> None:
    module = import_module(f"{formats.__package__}.{formats.FORMS[kind]}")
    shows = module.to_csv if kind == "Result" else module.page  # its pages are made of sections
    (takes, *_) = signature(shows).parameters.values()
    shown = {"Factorial": "Result", "Gated": "Result", "ProfileResult": "TraceResult"}.get(kind, kind)
    assert shown in takes.annotation.split(" | ")
