"""How an experiment is asked: as a module of this checkout, whose docstring is its help."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(script: str) -> str:
    """What runs a script of this folder: its arguments aside."""
    return "python -m " + ".".join(Path(script).relative_to(ROOT).with_suffix("").parts)


def parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """For the `__file__` and the `__doc__` of a script."""
    return argparse.ArgumentParser(
        prog=command(script),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def wanted(script: str, description: str | None, unit: str, default: int) -> int:
    """How much this call is to measure, where that is all there is to ask for."""
    asked = parser(script, description)
    asked.add_argument(
        "count", nargs="?", type=int, default=default, metavar=unit, help=f"default: {default}"
    )
    count: int = asked.parse_args().count
    return count


def chosen(script: str, description: str | None, known: Collection[str]) -> list[str]:
    """The names on the command line, each of which must be known; none without any."""
    asked = parser(script, description)
    asked.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names: list[str] = asked.parse_args().names
    unknown = [name for name in names if name not in known]
    if unknown:
        asked.error(f"no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def to_measure(
    script: str, description: str | None, known: Collection[str], there: Collection[str]
) -> list[str]:
    """The names on the command line, in the order of `known`; without any, those that are not `there` yet."""
    asked = chosen(script, description, known)
    return [name for name in known if (name in asked if asked else name not in there)]
