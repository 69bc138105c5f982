"""How often a history of nightly gates shows a change that is none, and how soon one that is, by simulation.

    python -m experiments.validation.change_points    two minutes

A night is one value, the change of main against one release; every night the whole history is searched
(harness/stats/change_points.py). Sizes are in units of the SD of a night. The arrays here search many
histories at once; `agree` checks some of them against that file itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from experiments.common import command_line
from experiments.common.record import write_result
from overlap_bench.harness.stats.change_points import (
    FEWEST,
    LEVEL,
    ORDERS,
    SHORTEST,
    change_points,
    differences,
    largest_splits,
)

YEAR, YEARS = 365, 1000
BEFORE, AFTER, RUNS = 60, 120, 400  # nights before a change and since, histories of each kind
WITHIN = (7, 14, 30)  # nights
NEAR = 2  # nights that a place may be off

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Noise = Callable[[np.random.Generator, int, int], Floats]  # (random, runs, nights), SD 1


def normal(random: np.random.Generator, runs: int, nights: int) -> Floats:
    return random.standard_normal((runs, nights))


def heavy_tailed(random: np.random.Generator, runs: int, nights: int) -> Floats:
    """Student's t on 3 degrees of freedom, whose SD is 3 ** .5."""
    return random.standard_t(3, (runs, nights)) / 3**0.5


def alike(random: np.random.Generator, runs: int, nights: int, correlation: float = 0.3) -> Floats:
    """Each night is like the one before it: what the search takes for granted does not hold."""
    found = normal(random, runs, nights)
    for night in range(1, nights):
        fresh = (1 - correlation**2) ** 0.5 * found[:, night]
        found[:, night] = correlation * found[:, night - 1] + fresh
    return found


NOISES: dict[str, Noise] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "each night like the last (correlation 0.3)": alike,
}


def step(size: float) -> Floats:
    return np.asarray(size * (np.arange(BEFORE + AFTER) >= BEFORE), np.float64)


def creep(slope: float) -> Floats:
    nights = np.arange(BEFORE + AFTER) - BEFORE + 1
    return np.asarray(slope * np.maximum(0, nights), np.float64)


CHANGES: dict[str, Floats] = {
    "a step of 1": step(1),
    "a step of 2": step(2),
    "a step of 3": step(3),
    "a step of 4": step(4),
    "a creep of 0.05 a night": creep(0.05),
}


def first_found(histories: Floats) -> Ints:
    """After how many nights each history first shows a change point; 0 where it never does."""
    found = np.zeros(len(histories), np.int64)
    too_many = round(LEVEL * (1 + ORDERS))  # orders that have as large a split
    for nights in range(SHORTEST, histories.shape[1] + 1):
        open_ = np.flatnonzero(found == 0)
        order = histories[open_, :nights].argsort(axis=1)
        largest = differences(np.asarray(order.argsort(axis=1) + 1, np.float64)).max(axis=1)
        found[open_[largest - 1e-9 > largest_splits(nights)[-too_many]]] = nights
    return found


def agree(histories: Floats) -> None:
    """Raises AssertionError where the harness finds something else than these arrays."""
    for history, nights in zip(histories, first_found(histories), strict=True):
        last = nights or len(history)
        assert not change_points(history[: last - 1])
        assert bool(change_points(history[:last])) == bool(nights)


def places(histories: Floats, found: Ints) -> float:
    """The share of the first change points that are NEAR where the change began, when they are found."""
    late = [(history, nights) for history, nights in zip(histories, found, strict=True) if nights > BEFORE]
    at = [change_points(history[:nights])[-1].index for history, nights in late]
    return float(np.mean([abs(index - BEFORE) <= NEAR for index in at])) if at else float("nan")


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    random = np.random.default_rng(2026)
    agree(normal(random, 20, 60) + step(2)[30:90])
    steady: dict[str, float] = {}
    seen: dict[str, dict[str, object]] = {}
    rows = []
    for name, noise in NOISES.items():
        steady[name] = float((first_found(noise(random, YEARS, YEAR)) > 0).mean())
        rows.append([name, "none", f"{steady[name]:.1%} of years", *[""] * (len(WITHIN) + 2)])
        for change, shape in CHANGES.items():
            histories = noise(random, RUNS, BEFORE + AFTER) + shape
            found = first_found(histories)
            early = (found > 0) & (found <= BEFORE)
            since = np.where(found > BEFORE, found - BEFORE, np.inf)[~early]
            shares = [float((since <= each).mean()) for each in WITHIN]
            median, near = float(np.median(since)), places(histories, found)
            seen[f"{name}: {change}"] = {
                "before": float(early.mean()),
                "within": dict(zip(map(str, WITHIN), shares, strict=True)),
                "median": median if np.isfinite(median) else None,
                "near": near,
            }
            rows.append(
                [
                    name,
                    change,
                    f"{early.mean():.1%} of {BEFORE} nights",
                    *(f"{each:.0%}" for each in shares),
                    f"{median:.0f}" if np.isfinite(median) else f"over {AFTER}",
                    f"{near:.0%}",
                ]
            )
    write_result(
        __file__,
        title="Nightly gates against one release: how often a history shows a change before there is one, "
        f"and how soon one that came after {BEFORE} nights (its size in SDs of a night); {YEARS:,} years, "
        f"and {RUNS} histories of each change",
        header=[
            "nights",
            "change",
            "seen where none is",
            *(f"found within {each} nights" for each in WITHIN),
            "median nights",
            f"placed within {NEAR} nights",
        ],
        rows=rows,
        data={"level": LEVEL, "fewest": FEWEST, "years": YEARS, "runs": RUNS, "steady": steady, "seen": seen},
    )


if __name__ == "__main__":
    main()
