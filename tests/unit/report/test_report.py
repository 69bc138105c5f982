"""The report of a run as a file: what it says first, that it needs nothing else, and that a run's own words
stay words."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pandas as pd
import pytest

import overlap_bench
from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.frames import Run
from overlap_bench.harness.report import html, sections, tables
from overlap_bench.harness.store.tables import table_path
from tests.support.in_process import bench
from tests.support.made_blocks import manifest
from tests.support.made_runs import stored
from tests.support.places import REFERENCE

RUN = REFERENCE / "runs" / "overlap"
NO_END_TAG = {"meta", "link"}
FETCHED = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
HOSTILE = '</h1><script>alert("x")</script><img src=http://example.org/x> [x](http://example.org) | $x$'


class Page(HTMLParser):
    """Tags, what they refer to, and the text by tag; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in FETCHED]
        self.references += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for _, value in attrs))
        if tag not in NO_END_TAG:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def first_in_body(self) -> str:
        return next(text for tag, text in self.texts if tag not in ("title", "style"))


def texts(page: Page, tag: str) -> list[str]:
    return [text for at, text in page.texts if at == tag]


@pytest.fixture(scope="module")
def run() -> Run:
    return overlap_bench.load(RUN)


@pytest.fixture(scope="module")
def page(run: Run) -> str:
    return html.to_html(run)


def test_the_file_needs_nothing_else(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "iframe", "object", "embed", "img"} & parsed.tags
    assert {ref for ref in parsed.references if not ref.startswith("#")} == {"data:,"}
    assert not re.search(r"@import|@font-face", page)
    assert "default-src 'none'" in page
    assert len(page.encode()) < 3_000_000


def test_the_verdict_comes_first_with_the_jsons_numbers(page: str) -> None:
    printed = json.loads(bench("compare", str(RUN), "--format", "json").out)
    (comparison,) = printed["comparisons"]
    row = comparison["metrics"][comparison["primary"]]
    first = Page(page).first_in_body()
    assert first == words.conclusion(printed["device"], overlap_bench.compare(RUN).comparisons[0])
    said = [float(each) for each in re.findall(r"([\d.]+)%", first)]
    expected = [-100 * row[name] for name in ("change", "ci_high", "ci_low")]  # it is called shorter
    assert said == [round(value, 2 if abs(value) < 1 else 1) for value in expected]
    assert f"({comparison['trials']} trials, " in first
    assert row["verdict"] in first


def test_the_parts_come_in_the_order_in_which_they_are_read(run: Run, page: str) -> None:
    parsed = Page(page)
    first, *others = (each.title for each in sections.page(run.result, run.result.comparisons[0]).tables)
    headings = [*texts(parsed, "h2"), *texts(parsed, "summary")]
    assert headings == [
        "Trial by trial", "Host phases", "Warnings", first, "Changes", "Latencies", "Over time", *others,
        "Method", "Environment", "Settings", "Every metric",
    ]  # fmt: skip
    assert (first, others[-2:]) == ("Before and after", ["Mechanism", "Limit"])


def test_every_cell_is_a_cell_of_the_commands_tables(run: Run, page: str) -> None:
    (comparison,) = run.result.comparisons
    cells = texts(Page(page), "td")
    printed = sections.page(run.result, comparison)
    for table in (*printed.tables, tables.metric_table(comparison, every=True)):
        assert {cell for row in table.rows for cell in row[1:] if cell} <= set(cells)
    assert set(printed.lines) <= set(texts(Page(page), "p"))
    # What a variant is said to be today is no part of a stored run. A figure's path may hold any digits.
    assert not any("4790" in text for text in (*cells, *texts(Page(page), "p")))


def test_the_command_writes_a_page_and_markdown(tmp_path: Path) -> None:
    folder = stored(tmp_path, "a", 0.9, plan=manifest(1))
    for name in ("report.html", "deep/report.md"):
        out = tmp_path / name
        assert bench("report", folder, "-o", str(out)).out == f"{out}\n"
    conclusion = Page((tmp_path / "report.html").read_text()).first_in_body()
    assert ": one trial gives no verdict. TPOT p50 is " in conclusion
    assert conclusion.endswith("(1 trial, emulated device).")
    markdown = (tmp_path / "deep" / "report.md").read_text()
    assert markdown.startswith(f"**{conclusion}**\n")
    assert markdown.index("### Warnings") < markdown.index("<details>") < markdown.index("### Environment")
    assert markdown.rstrip().endswith("</details>")


def test_one_arm_has_no_changes_and_a_figure_that_can_not_be_drawn_says_why(tmp_path: Path) -> None:
    """Its engine records no steps."""
    folder = Path(stored(tmp_path, "a", plan=manifest(2, arms=1)))
    for number in range(2):
        for table in ("steps", "work"):
            table_path(folder, number, table).unlink()
    alone = overlap_bench.load(folder)
    page = Page(html.to_html(alone))
    assert "TPOT p50 is 4.001 ms (2 trials, " in page.first_in_body()
    headings = set(texts(page, "h2"))
    assert not {"Changes", "Trial by trial"} & headings
    assert {"One arm", "Latencies"} <= headings
    assert "after" not in texts(page, "th")
    assert "One arm" in html.to_markdown(alone)
    assert any("has no step records, so no phases" in text for text in texts(page, "figcaption"))


def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    plan = manifest(1)
    arms = tuple(msgspec.structs.replace(arm, env={"X": HOSTILE + arm.name}) for arm in plan.design.arms)
    design = msgspec.structs.replace(plan.design, arms=arms, name=HOSTILE)
    plan = msgspec.structs.replace(plan, design=design)
    folder = Path(stored(tmp_path, "a", 0.9, plan=plan))
    path = table_path(folder, 0, "requests")
    frame = pd.read_parquet(path)
    frame.loc[0, "error"] = HOSTILE + "\n\n# a heading"
    frame.to_parquet(path)
    run = overlap_bench.load(folder)
    parsed = Page(html.to_html(run))
    assert not {"script", "img"} & parsed.tags
    assert parsed.first_in_body().startswith(HOSTILE)
    markdown = html.to_markdown(run)
    assert not re.search(r"<(?!/?details>|/?summary>)", markdown)
    assert "](http" not in markdown
    assert "\n# a heading" not in markdown


def test_a_report_goes_into_the_folder_of_its_run_or_says_where_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "a run"
    shutil.copytree(RUN, run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(html, "to_html", lambda run: "the page")
    assert bench("report", "a run").out == "a run/report.html\n"
    assert (run / "report.html").read_text() == "the page"
    (run / "report.html").unlink()
    (run / "report.html").mkdir()  # as little to be written as in a folder of somebody else's
    said = bench("report", "a run", code=2)
    assert said.out == ""
    assert said.err.startswith("bench: can't write a run/report.html: ")
    assert said.err.endswith("; give another place with -o report.html\n")
    bench("compare", "a run")


@pytest.mark.parametrize("display", [":0", ""])
def test_a_page_is_opened_where_there_is_a_display(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, display: str
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: not opened.append(url))
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    out = tmp_path / "page.md"
    run = REFERENCE / "runs" / "pinned-h2d-turns"
    said = bench("report", str(run), "-o", str(out), "--open").err
    assert opened == ([out.as_uri()] if display else [])
    assert ("no display" in said) == (not display)
