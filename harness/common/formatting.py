"""How a value is written: numbers, shares, counts of blocks."""

from __future__ import annotations

import re

# What moves a terminal's cursor or turns text around: control characters besides tab and newline, and
# Unicode's directional overrides.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NO_LINE = re.compile(r"[\t\n\u2028\u2029\ud800-\udfff]")


def visible(text: str) -> str:
    """The text with each such character as its escape: names come from files of others."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_line(text: str) -> str:
    """Text of others as one line that any file can hold: with what ends a line, and halves of a pair of
    surrogates, as escapes too."""
    return NO_LINE.sub(lambda found: found[0].encode("unicode_escape").decode(), visible(text))


def visible_json(text: str) -> str:
    """JSON text with such characters as JSON's own escapes."""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
    return f"{count} trial{'s' if count != 1 else ''}"


def minutes_of(count: float) -> str:
    return f"{count:g} minute{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    """Two significant digits: "25 min"."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 1.6 * size:  # 90 s, 90 min and 36 h stay in the smaller unit
            amount = seconds / size
            return f"{amount:,.0f} {unit}" if amount >= 10 else f"{amount:.2g} {unit}"
    return f"{seconds:.0f} s"


def between(low: str, high: str) -> str:
    """A range, its unit once where both ends have the same: "8 to 25 min"."""
    if low == high:
        return low
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def with_unit(value: float | None, unit: str) -> str:
    return f"{number(value)} {unit}".strip()


def percent(fraction: float | None) -> str:
    """A signed share, "−5.9%"; two decimals under 1%, none from 1,000% on."""
    if fraction is None:
        return ""
    digits = 2 if abs(fraction) < 0.01 else 1 if abs(fraction) < 10 else 0
    return f"{fraction:+,.{digits}%}".replace("-", "−")


def share(fraction: float) -> str:
    """One that has no sign, such as a limit: "2%", "0.25%"."""
    return f"{100 * fraction:.3g}%"


def signed(value: float) -> str:
    """Three significant digits with a sign; whole numbers from 1,000 on."""
    text = f"{value:+,.0f}" if abs(value) >= 999.5 else f"{value:+.3g}"
    return text.replace("-", "−")
