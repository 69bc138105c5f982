"""One trace or two, as an object, markdown and csv."""

import csv
import io
from pathlib import Path

import pytest

from overlap_bench.harness.analysis.plain import to_plain
from overlap_bench.harness.report import trace_tables
from overlap_bench.harness.report.page import markdown_page
from overlap_bench.harness.trace import analysis, trace_file
from overlap_bench.harness.trace.result import Value
from overlap_bench.harness.trace.result import result as traces_result
from tests.support import nsys_export as made
from tests.support.traces import two


def test_two_traces_are_set_against_each_other(tmp_path: Path) -> None:
    result = two(tmp_path)
    (device,) = result.parts["devices"].rows
    assert to_plain(device.values["busy_ms"]) == {
        "unit": "ms",
        "before": pytest.approx(0.0035),
        "after": pytest.approx(0.004),
        "change": pytest.approx(1 / 7),
    }
    copies = {tuple(row.key): row.values["count"] for row in result.parts["copies"].rows}
    gone, new = copies["HtoD", "pinned", "to 4 KiB"], copies["HtoD", "pageable", "to 4 KiB"]
    assert (gone.before, gone.after, gone.change) == (1, 0, -1)
    assert (new.before, new.after, new.change) == (0, 1, None)
    assert any("no interval and no verdict" in line for line in result.warnings)


def test_traces_of_different_length_are_warned_of(tmp_path: Path) -> None:
    sides = []
    for name, end in (("before", 1000), ("after", 1100)):
        tables = {"CUPTI_ACTIVITY_KIND_KERNEL": [made.kernel(0, end)]}
        trace = trace_file.read(made.write(tmp_path / f"{name}.sqlite", tables, ("gemm",)))
        sides.append((trace, analysis.analyse(trace)))
    said = "the traces are of different length"
    assert any(said in line for line in traces_result(*sides).warnings)
    assert not any(said in line for line in traces_result(sides[0], sides[0]).warnings)


def test_each_value_is_a_line_of_csv(tmp_path: Path) -> None:
    result = two(tmp_path)
    lines = list(csv.DictReader(io.StringIO(trace_tables.to_csv(result))))
    cells = [value for found in result.parts.values() for row in found.rows for value in row.values]
    assert len(lines) == len(cells)
    (busy,) = [line for line in lines if line["measure"] == "busy_ms"]
    assert (busy["part"], busy["key"], float(busy["before"])) == ("devices", "0", 0.0035)


def test_markdown_has_a_table_for_each_part_with_rows(tmp_path: Path) -> None:
    text = markdown_page(trace_tables.page(two(tmp_path)))
    assert "| device |  | before | after | change |" in text
    assert "| 0 | window_ms |" in text
    assert "### Ranges\n\nNone in the trace.\n" in text


def test_a_share_changes_by_points() -> None:
    value = Value(unit="", before=0.866, after=0.979, change=0.979 / 0.866 - 1)
    assert trace_tables._change("busy", value) == "+11.3 points"
    assert trace_tables._change("busy_ms", value) == "+13.0%"
    assert trace_tables._change("share", Value(unit="", before=0.866, after=None, change=None)) == ""
