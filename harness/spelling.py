"""How a value is written: numbers and shares, changes with their intervals, verdicts.

`row` is one metric of a comparison, as in the object of `--format json`: it has all of ROW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROW = (
    "unit", "better", "before", "after", "change", "delta", "ci_low", "ci_high", "sd", "p", "p_adjusted",
    "verdict", "floor",
)  # fmt: skip


def number(value: float | None) -> str:
    """Four significant digits, an exponent only under 0.001; "–" for none."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4g}"


def blocks_of(count: int) -> str:
    return f"{count} block{'s' if count != 1 else ''}"


def with_unit(value: float | None, unit: str) -> str:
    return f"{number(value)} {unit}".strip()


def percent(fraction: float | None) -> str:
    """A signed share, "−5.9%"; two decimals under 1%, none from 1,000% on."""
    if fraction is None:
        return ""
    digits = 2 if abs(fraction) < 0.01 else 1 if abs(fraction) < 10 else 0
    return f"{fraction:+,.{digits}%}".replace("-", "−")


def difference(row: Mapping[str, Any]) -> str:
    """The change in percent, or in the unit where the metric can be zero; "–" where one side is missing."""
    if row["change"] is not None:
        return percent(row["change"])
    if row["delta"] is None:
        return "–"
    return f"{_signed(row['delta'])} {row['unit']}".strip()


def interval(row: Mapping[str, Any]) -> str:
    if row["ci_low"] is None:
        return ""
    if row["change"] is not None:
        return f"[{percent(row['ci_low'])}, {percent(row['ci_high'])}]"
    return f"[{_signed(row['ci_low'])}, {_signed(row['ci_high'])}]"


def floor(row: Mapping[str, Any]) -> str:
    """What equal arms show, "±1.2%"."""
    if row["floor"] is None:
        return ""
    return f"±{(percent if row['change'] is not None else _signed)(row['floor'])[1:]}"


def _signed(value: float) -> str:
    """Three significant digits with a sign; whole numbers from 1,000 on."""
    text = f"{value:+,.0f}" if abs(value) >= 999.5 else f"{value:+.3g}"
    return text.replace("-", "−")


def verdict(row: Mapping[str, Any], primary: bool) -> str:
    """The verdict, or what the row is in its place."""
    if row["verdict"] is not None:
        return str(row["verdict"])
    if row["ci_low"] is None:
        return ""
    return "no verdict" if primary else "descriptive"


def confidence(comparison: Mapping[str, Any]) -> str:
    """Of the intervals, in percent: "95"."""
    return f"{100 * comparison['confidence']:.4g}"


def confidences(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The same of several, "97.45 to 99.75" where runs that may stop early stopped at different looks."""
    every = sorted(comparisons, key=lambda each: float(each["confidence"]))
    return " to ".join(dict.fromkeys(map(confidence, (every[0], every[-1]))))
