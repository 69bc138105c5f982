"""How numbers, differences and shares are written."""

import json

import pytest

from overlap_bench.harness.analysis import words
from overlap_bench.harness.analysis.result import MetricRow
from overlap_bench.harness.common import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (12.3456, "12.35"), (3042.19, "3,042"), (1e-5, "1.00e-05"), (-0.5, "-0.5")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert formatting.number(value) == text


@pytest.mark.parametrize(
    ("delta", "low", "high", "text"),
    [
        (-1030.4, -2055.0, -3.121, ("−1,030 us", "[−2,055, −3.12]")),
        (999.7, 0.0421, 31_000.0, ("+1,000 us", "[+0.0421, +31,000]")),
    ],
)
def test_a_difference_of_thousands_is_written_out(
    delta: float, low: float, high: float, text: tuple[str, str]
) -> None:
    row = MetricRow(unit="us", better="lower", delta=delta, ci_low=low, ci_high=high, floor=1234.5)
    assert (words.difference(row), words.interval(row)) == text
    assert words.floor(row) == "±1,234"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(-0.0042, "−0.42%"), (0.0587, "+5.9%"), (9.42, "+942.0%"), (336.252, "+33,625%")],
)
def test_percents(fraction: float, text: str) -> None:
    assert formatting.percent(fraction) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("up\x1b[1A\rdown", "up\\x1b[1A\\rdown"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202eexe.", "\\u202eexe."),
        ("−5.9% → é\tb\n", "−5.9% → é\tb\n"),
    ],
)
def test_what_would_move_a_terminal_s_cursor_is_seen(name: str, text: str) -> None:
    assert formatting.visible(name) == text
    assert json.loads(formatting.visible_json(json.dumps(name, ensure_ascii=False))) == name


def test_a_name_in_one_line_has_no_ends_of_lines_and_no_half_characters() -> None:
    assert formatting.visible_line("a\tb\nc\x1b\u2028\ud800é") == "a\\tb\\nc\\x1b\\u2028\\ud800é"
