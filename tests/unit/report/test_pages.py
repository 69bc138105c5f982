"""Tables keep to the width of the terminal and break no name, and their markdown is even."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from overlap_bench.engines.api import find_engines
from overlap_bench.harness.cli import listings
from overlap_bench.harness.common import consoles
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.report import formats
from overlap_bench.harness.report.page import Table, csv_text, terminal_table
from tests.support.made_blocks import manifest, result, shown
from tests.support.places import ROOT


@pytest.mark.parametrize("width", [60, 72, 89, 90, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = shown(result(0.9, manifest(secondaries=("latency_ms_p50",))), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Before and after", "Outputs", "Mechanism", "Limit", "Warnings", "tpot_ms_p50", "faster"):
        assert word in text


@pytest.mark.parametrize("name", [each.name for each in load_variants().values() if each.engine == "overlap"])
def test_a_variant_in_full_says_where_its_code_is(name: str) -> None:
    found, text = load_variants()[name], io.StringIO()
    Console(file=text, width=80).print(listings.variant(found, find_engines(), 80))
    said = " ".join(text.getvalue().split())
    for toggle in found.changes:
        path = f"engines/overlap/toggles/{toggle.replace('-', '_')}.py"
        assert path in said
        assert (ROOT / path).exists()


def test_markdown_is_a_table_of_even_rows() -> None:
    lines = [line for line in formats.to_markdown(result()).splitlines() if line.startswith("|")]
    widths: list[int] = [line.count("|") for line in lines]
    starts = [index for index, line in enumerate(lines) if set(line) <= set("|-: ")]
    for start, end in zip(starts, [*(each - 1 for each in starts[1:]), len(lines)], strict=True):
        assert len(set(widths[start - 1 : end])) == 1


def lines(table: Table, width: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(*terminal_table(table, width), sep="\n")
    return text.getvalue().splitlines()


def words(table: Table, width: int) -> list[str]:
    return " ".join(lines(table, width)).split()


DEVICES = Table(
    "Devices",
    ("device", "window_ms", "busy_ms", "busy", "copy_only_ms", "idle_ms", "host_wait_ms", "sync_wait_ms",
     "launch_wait_ms", "other_ms"),
    (("emulated on Intel(R) Xeon(R)", "21,711.5", "20,432.5", "94.1%", "0.08257", "1.196", "0.5198", "0.2906",
      "0.2195", "0.1662"),),
    "",
    ("window_ms", "busy_ms", "busy", "copy_only_ms", "idle_ms", "host_wait_ms", "sync_wait_ms",
     "launch_wait_ms", "other_ms"),
)  # fmt: skip
STEP = Table(
    "Where a decode step goes",
    ("us of a step", "before", "share", "after", "of it", "change", "interval"),
    (
        ("interval", "3,697.3", "100.0%", "3,309.7", "100.0%", "−387.6", "[−482, −293]"),
        ("completion latency", "130.9", "3.5%", "0.1", "0.0%", "−1,130.8", "[−1,440, −1,180]"),
    ),
    "",
    ("before", "share", "after", "of it", "change"),
)


@pytest.mark.parametrize("table", [DEVICES, STEP], ids=["devices", "step"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_and_no_name_of_a_narrow_table_is_broken(table: Table, width: int) -> None:
    shown = words(table, width)
    assert max(map(len, lines(table, width))) <= width
    for cell in (*table.rows[0], *table.rows[-1]):
        assert set(cell.split()) <= set(shown), cell
    if width == 60:  # columns below each other, each with the whole of its name
        assert set(" ".join(table.columns).split()) <= set(shown)


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("@SUM(1)", "'@SUM(1)"),
        ("+cmd|x", "'+cmd|x"),
        ("-cmd|x", "'-cmd|x"),
        ("-2+3+cmd|x", "'-2+3+cmd|x"),
        ("-5.9%", "-5.9%"),
        ("a=b", "a=b"),
        (-5.9, "-5.9"),
    ],
)
def test_no_cell_of_a_csv_is_a_formula(cell: str | float, written: str) -> None:
    assert csv_text(("x",), [(cell,)]) == f"x\n{written}\n"


def test_a_name_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("t\x1b[2J", ("metric", "before"), (("\x1b]0;x\x07", "1"),), "note\x1b[A")
    screen = consoles.Console(width=80)
    screen.print(*terminal_table(table, 80), sep="\n")
    written = capsys.readouterr().out
    assert "\x1b" not in written
    assert "\\x1b]0;x\\x07" in written


def test_a_line_that_goes_to_a_file_has_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("t", ("metric", "found"), (("ttft", "faster"), ("tpot", "undecided")), "a note", ())
    consoles.Console(width=80).print(*terminal_table(table, 80), sep="\n")
    written = capsys.readouterr().out.splitlines()
    assert " ttft     faster" in written
    assert [line for line in written if line.endswith(" ")] == []


def test_a_terminal_gets_what_rich_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    consoles.Console(width=80).print(Text("faster", style="bold"))
    assert "\x1b[1m" in capsys.readouterr().out
