"""Values that nobody thought of: those that broke something somewhere before, and what hypothesis draws."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

DRAWN = 1000  # of hypothesis, once: drawing anew for each case would take longer than the case
NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63)),
    *(1 << 64, 1 << 70, 10**400, 0.5, -0.0, 1e-308, 5e-324, 1e18, 1e300, float("inf"), float("-inf")),
    float("nan"),
)
TEXTS = (
    *("", " ", "\t", "\n", "a\nb", "\r\n", "\x1b[2J", "\u202e", "\ufeff", "é", "日本", "💥", "null", "None"),
    *("NaN", "inf", "-inf", "1e999", "0x10", "1_000", "٣", "-", "--", "=", ",", ":", "%", "1%", "-1%", "a=b"),
    *("{}", "{0}", "%s", "$HOME", "`id`", "'", '"', "\\", "*", "[bold]", "[/]", "[red", "../..", "/", "//"),
    *("/nowhere/at/all", ".", "..", "~", "~nobody", "con", "a" * 300, "a" * 5000, "1" * 5000, "[" * 500),
    *("a/b", "a:b", ":", "::", "a:before", "é" * 200, "-" * 100, "\udcff", "\u2028", "\x7f"),
)


@cache
def drawn() -> tuple[Any, ...]:
    """JSON values of every kind; the same in every process of one version of hypothesis."""
    found: list[Any] = []
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    inner = st.recursive(leaves, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=8)

    @seed(0)
    @settings(
        database=None,
        deadline=None,
        max_examples=DRAWN,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inner)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return tuple(found)


def number(random: Random) -> int | float:
    return random.choice(NUMBERS)


def text(random: Random) -> str:
    """As a JSON document may hold it."""
    if random.random() < 0.7:
        return random.choice(TEXTS)
    value = random.choice(drawn())
    return value if isinstance(value, str) else json.dumps(value)


def any_value(random: Random) -> Any:
    """Whatever JSON has."""
    match random.randrange(6):
        case 0:
            return number(random)
        case 1:
            return text(random)
        case 2:
            return random.choice((None, True, False, [], {}, [[]], [None], {"": None}, [0] * 1000))
        case 3:
            return nested(random.choice((10, 100, 600)))
        case _:
            return deepcopy(random.choice(drawn()))  # a case changes it in its place


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def word(random: Random) -> str:
    """As a command line may hold it: no NUL, and bytes that are no text as Python passes them on."""
    found = text(random) if random.random() < 0.7 else str(number_text(random))
    return found.replace("\0", "").encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def number_text(random: Random) -> str:
    found = number(random)
    return str(found) if abs(found) < 10**300 else repr(float("inf") if found > 0 else float("-inf"))
