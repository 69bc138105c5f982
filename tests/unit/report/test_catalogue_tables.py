"""The catalogue as a table to read, and as a page that sorts."""

import re
from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.analysis.catalogue import Catalogue, Entry
from overlap_bench.harness.report import catalogue_tables, formats
from overlap_bench.harness.store.files import SCHEMA_VERSION
from tests.support.made_blocks import shown

CLAIM = {"claim": "pinned-h2d", "title": "t", "source": "roseinfer", "says": "TPOT −5.9%"}
MEASURED = {"metric": "decode_step_ms", "change": -0.017, "ci_low": -0.018, "ci_high": -0.016}
FOUND = Catalogue(
    schema_version=SCHEMA_VERSION,
    entries=[
        Entry(**CLAIM, **MEASURED, verdict="faster", step_ms=11.1, batch=16, found_in="series.md"),
        Entry(**CLAIM, **MEASURED, verdict="less here", found_in="experiments/blog"),
        Entry(claim="mine", title="t", source="<script>alert(1)</script>", says="a | b"),
    ],
)


def test_a_claim_is_said_once_and_its_measurements_stand_under_each_other() -> None:
    rows = [line for line in formats.to_markdown(FOUND).splitlines() if line.startswith("|")][2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == ["pinned-h2d", "", "mine"]
    assert "−1.7% [−1.8%, −1.6%]" in rows[0]
    assert rows[0].endswith("[series](series.md) |")
    assert rows[1].endswith("[blog](experiments/blog) |")
    assert "not measured" in rows[2]


def test_csv_and_json_repeat_it_in_each_line() -> None:
    lines = formats.to_csv(FOUND).splitlines()
    assert [line.split(",")[0] for line in lines] == ["claim", "pinned-h2d", "pinned-h2d", "mine"]
    assert '"change": -0.017' in formats.to_json(FOUND)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_table_keeps_to_the_terminal(width: int) -> None:
    text = shown(FOUND, width)
    assert max(map(len, text.splitlines())) <= width
    assert "pinned-h2d" in text


def test_the_page_says_what_each_column_sorts_by_and_takes_what_is_claimed_for_text(tmp_path: Path) -> None:
    path = tmp_path / "claims.html"
    catalogue_tables.write(FOUND, path)
    page = path.read_text()
    assert re.findall(r'data-key="([^"]+)"', page) == ["-0.017", "11.1", "16", "-0.017"]
    assert page.count("<button") == len(catalogue_tables.COLUMNS)
    assert page.count("pinned-h2d") == 2
    assert "<script>alert" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_page_that_can_not_be_written_is_one_line() -> None:
    with pytest.raises(api.BadSetting, match="can't write /dev/null/claims"):
        catalogue_tables.write(FOUND, Path("/dev/null/claims.html"))
