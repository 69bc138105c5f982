"""A few settings of an engine's toggles that hold every pair of choices."""

from __future__ import annotations

from itertools import combinations


def pairs(settings: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(sorted(settings.items()), 2))


def pairwise_cover(every: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of these settings a few, in which each pair of choices stands together that does in any of them."""
    held = [(settings, pairs(settings)) for settings in every]
    missing = set().union(*(each for _, each in held))
    chosen = []
    while missing:
        best, covered = max(held, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen
