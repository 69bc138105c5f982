"""A few settings of an engine's toggles that hold every pair of choices."""

from itertools import combinations


def pairs(settings: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(sorted(settings.items()), 2))


def pairwise_cover(every: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few of these settings that together hold every pair of choices that any of them holds."""
    held = [(settings, pairs(settings)) for settings in every]
    missing = set().union(*(each for _, each in held))
    chosen = []
    while missing:
        best, covered = max(held, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen
