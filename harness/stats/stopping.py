"""When a run may stop before its last block, declared before its first one: the two rules there are. Why they
are safe, and their rates by simulation: stats.md, Stopping early.

**decided** (group-sequential). Looks at 6, 8, ... blocks; at look k, of n_k blocks, the t test is made at
level p_k = 2 · (1 - Phi(c · (n_k / n_K)^(-1/4))), and its interval has level 1 - p_k. (Wang & Tsiatis,
"Approximately optimal one-parameter boundaries for group sequential trials", Biometrics 1987; Jennison &
Turnbull, "Interim analyses: the repeated confidence interval approach", JRSS B 1989.)

**precise**. Looks after every block from the sixth on, and stops once the half-width of the interval is small
enough. A spread that is small by chance stops it too, so tests are made at 3%, which keeps the false alarms
at 5% or less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from overlap_bench.engines.api import BadSetting

if TYPE_CHECKING:
    import numpy as np

ALPHA = 0.05  # two-sided, of each interval and verdict of a fixed number of blocks
FIRST_LOOK = 6
BETWEEN_LOOKS = 2
LOOKS_OF_GATE = (3, 4, 5, 6)
MOST_BLOCKS = 100  # that a plan may allow: calibrating it takes seconds, and a longer run days
DEFAULT_MOST = 20
SHAPE = -0.25  # Delta - 1/2 of Wang and Tsiatis
PRECISION_ALPHA = 0.03
PATHS = 400_000  # simulated runs: the level is right to 0.0004
CHUNK = 20_000
SEED = 1987


def until_decided(most: int) -> Until:
    """The group-sequential plan of at most `most` blocks. Raises BadSetting where there is none."""
    _check(most, "--until-decided")
    places = looks(most)
    return Until(rule="decided", looks=places, levels=levels(places, ALPHA))


def until_clear() -> Until:
    """A gate's usual plan. Its limit is often many times what the pairs scatter by, and then three blocks
    show it; where it is not, it has the six of a fixed run."""
    return Until(rule="decided", looks=LOOKS_OF_GATE, levels=levels(LOOKS_OF_GATE, ALPHA))


def until_precise(precision: float, most: int) -> Until:
    """Stop at a half-width of `precision` (a fraction). Raises BadSetting where that means nothing."""
    _check(most, "--until-precision")
    if not 0 < precision < 1:
        raise BadSetting(f"--until-precision must be above 0% and below 100%, not {100 * precision:.4g}%")
    places = tuple(range(FIRST_LOOK, most + 1))
    return Until(rule="precise", looks=places, levels=(PRECISION_ALPHA,) * len(places), precision=precision)


def _check(most: int, flag: str) -> None:
    if not FIRST_LOOK <= most <= MOST_BLOCKS:
        raise BadSetting(f"{flag} needs --max-trials from {FIRST_LOOK} to {MOST_BLOCKS}, not {most}")


def looks(most: int) -> tuple[int, ...]:
    """6, 8, ... and `most` itself."""
    places = tuple(range(FIRST_LOOK, most + 1, BETWEEN_LOOKS))
    return places if places[-1] == most else (*places, most)


def levels(places: tuple[int, ...], alpha: float) -> tuple[float, ...]:
    """The two-sided level of each look, to six decimals; the same for the same arguments.

    With x_k the normal quantile whose two-sided p is |t_k|'s, look k rejects where x_k · (n_k/n_K)^(1/4) > c.
    So c is the 1 - alpha quantile of the largest of these over the looks of a simulated run, and no search is
    needed. One look is the fixed test, at alpha.
    """
    import numpy as np

    from overlap_bench.harness.stats.distributions import normal_tail

    if len(places) == 1:
        return (alpha,)
    weights = (np.array(places) / places[-1]) ** -SHAPE
    random = np.random.default_rng(SEED)
    largest = np.concatenate(
        [
            (as_normal(random.standard_normal((CHUNK, places[-1])), places) * weights).max(axis=1)
            for _ in range(PATHS // CHUNK)
        ]
    )
    bar = float(np.quantile(largest, 1 - alpha))
    return tuple(round(float(each), 6) for each in 2 * normal_tail(bar / weights))


def as_normal(
    differences: np.ndarray[tuple[int, int], np.dtype[np.float64]], places: tuple[int, ...]
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """The normal quantile that has the two-sided p of the t statistic of runs [runs, blocks] of paired
    differences, at each look [runs, looks], up to 8 (p = 1e-15)."""
    import numpy as np

    from overlap_bench.harness.stats.distributions import normal_tail, t_quantile

    sums = np.cumsum(differences, axis=1)
    squares = np.cumsum(differences**2, axis=1)
    normal = np.linspace(0, 8, 801)
    tails = normal_tail(normal)
    columns = []
    for n in places:
        mean = sums[:, n - 1] / n
        variance = np.maximum(squares[:, n - 1] - n * mean**2, 0) / (n - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            statistic = np.abs(mean) / np.sqrt(variance / n)
        student = -t_quantile(tails, n - 1)  # as unlikely as `normal`, point by point
        columns.append(np.interp(np.nan_to_num(statistic), student, normal))
    return np.stack(columns, axis=1)


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that may stop a run before its last block."""

    rule: Literal["decided", "precise"]
    looks: tuple[int, ...]  # numbers of blocks at which the rule looks, ascending
    levels: tuple[float, ...]  # two-sided, of the test at each look; its interval has 1 - level
    precision: float | None = None  # of "precise": the half-width that is enough, as a fraction
