"""Many runs at once, simulated: boots, the orders they are drawn in, and the rules of a verdict.

Boots are simulated, not blocks: each block has two, one after the other, in an order drawn as in a run, so
that what moves with time (a drift, a random walk, a period of eight boots) reaches the paired differences as
it does in a run. Everything is in units of the SD of a pair. The arrays here are the rules of stats.py and
stopping.py over many runs at once; `agree` checks some runs against those files themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats as distributions

from overlap_bench.engines import api
from overlap_bench.harness.analysis.values import reason_to_stop
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.plan.design import DRAWN_TOGETHER, Arm, Design
from overlap_bench.harness.stats.stopping import ALPHA, Until
from overlap_bench.harness.workload.workload import Workload

SD = 0.01  # of a pair's log ratio; every size below is in units of it
MOST = 20
SECONDARIES = 5
NEVER_SAME = 0.0  # a margin of nothing: every detected change counts

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]  # (random, runs, boots) -> [runs, boots], pair SD 1


# -- noise ------------------------------------------------------------------------------------------------


def normal(random: np.random.Generator, runs: int, boots: int) -> Floats:
    return random.standard_normal((runs, boots)) / 2**0.5


def heavy_tailed(random: np.random.Generator, runs: int, boots: int) -> Floats:
    """Student's t on 3 degrees of freedom, whose SD is 3 ** .5."""
    return random.standard_t(3, (runs, boots)) / 6**0.5


def drifting(random: np.random.Generator, runs: int, boots: int) -> Floats:
    """A quarter of a pair SD per boot: ten SDs over twenty blocks."""
    return normal(random, runs, boots) + 0.25 * np.arange(boots)


def rushing(random: np.random.Generator, runs: int, boots: int) -> Floats:
    """Two pair SDs per boot: the order decides nearly all of a pair's difference."""
    return normal(random, runs, boots) + 2.0 * np.arange(boots)


def walking(random: np.random.Generator, runs: int, boots: int) -> Floats:
    return normal(random, runs, boots) + 0.5 * np.cumsum(random.standard_normal((runs, boots)), axis=1)


def periodic(random: np.random.Generator, runs: int, boots: int, period: int = 8) -> Floats:
    """A sine of so many boots, one pair SD high, that starts anywhere."""
    phase = random.uniform(0, 2 * np.pi, (runs, 1))
    return normal(random, runs, boots) + np.sin(2 * np.pi * np.arange(boots) / period + phase)


def alternating(random: np.random.Generator, runs: int, boots: int) -> Floats:
    """A sine of four boots: what the second boot of a block has over the first turns round in the next."""
    return periodic(random, runs, boots, 4)


NOISES: dict[str, Noise] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "drift": drifting,
    "random walk": walking,
    "period of 8 boots": periodic,
    "period of 4 boots": alternating,
    "extreme drift": rushing,
}


def differences(noise: Noise, random: np.random.Generator, runs: int, blocks: int) -> Floats:
    """Paired log ratios [runs, blocks] of arms that do not differ."""
    return ordered(noise, random, runs, blocks)[0]


def ordered(
    noise: Noise,
    random: np.random.Generator,
    runs: int,
    blocks: int,
    after_first: npt.NDArray[np.bool_] | None = None,
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The same, and for each block whether the after arm ran first (given: as it was drawn)."""
    boots = noise(random, runs, 2 * blocks).reshape(runs, blocks, 2)
    if after_first is None:
        after_first = drawn(random, runs, blocks)
    later = boots[:, :, 1] - boots[:, :, 0]
    return SD * np.where(after_first, -later, later), after_first


def drawn(random: np.random.Generator, runs: int, blocks: int) -> npt.NDArray[np.bool_]:
    """As design.orders of two arms: any of the 62 ways in which six blocks do not all have one order."""
    sixes = random.integers(1, 2**DRAWN_TOGETHER - 1, (runs, -(-blocks // DRAWN_TOGETHER), 1))
    coins = (sixes >> np.arange(DRAWN_TOGETHER)) & 1 == 1
    found: npt.NDArray[np.bool_] = coins.reshape(runs, -1)[:, :blocks]
    return found


# -- the rules, over many runs ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """The trials that each run took, and its verdict: -1 faster, 1 slower, 0 same, 2 undecided."""

    blocks: npt.NDArray[np.int64]
    verdict: npt.NDArray[np.int64]

    @property
    def detected(self) -> float:
        return float((np.abs(self.verdict) == 1).mean())

    @property
    def same(self) -> float:
        return float((self.verdict == 0).mean())


def intervals(pairs: Floats, n: int, alpha: float) -> tuple[Floats, Floats]:
    mean = pairs[:, :n].mean(axis=1)
    half = distributions.t.ppf(1 - alpha / 2, n - 1) * pairs[:, :n].std(axis=1, ddof=1) / n**0.5
    return mean - half, mean + half


def verdicts(low: Floats, high: Floats, margin: float) -> npt.NDArray[np.int64]:
    """As stats.verdict, whose margin is a fraction: ±margin as log ratios."""
    found = np.full(len(low), 2)
    found[low > 0] = 1
    found[high < 0] = -1
    found[(low > np.log1p(-margin)) & (high < np.log1p(margin))] = 0
    return found


def fixed(pairs: Floats, n: int, margin: float) -> Ended:
    return Ended(np.full(len(pairs), n), verdicts(*intervals(pairs, n, ALPHA), margin))


def sequential(pairs: Floats, until: Until, margin: float) -> Ended:
    """As comparison.reason_to_stop."""
    blocks = np.full(len(pairs), until.looks[-1])
    found = np.full(len(pairs), 2)
    running = np.ones(len(pairs), bool)
    for look, level in zip(until.looks, until.levels, strict=True):
        low, high = intervals(pairs, look, level)
        now = verdicts(low, high, margin)
        if until.rule == "decided":
            stops = running & (now != 2)
        else:
            assert until.precision is not None
            stops = running & ((np.expm1(high) - np.expm1(low)) / 2 <= until.precision)
        stops |= running & (look == until.looks[-1])
        blocks[stops], found[stops] = look, now[stops]
        running &= ~stops
    return Ended(blocks, found)


def family(pairs: list[Floats], ended: Ended, level_at: Callable[[int], float]) -> float:
    """The share of runs in which Holm rejects any of these: the smallest p is under level / their number."""
    alarms = np.zeros(len(ended.blocks), bool)
    for n in np.unique(ended.blocks):
        at = ended.blocks == n
        level = level_at(int(n))
        for each in pairs:
            low, high = intervals(each[at], int(n), level / len(pairs))
            alarms[at] |= (low > 0) | (high < 0)
    return float(alarms.mean())


def agree(pairs: Floats, until: Until, margin: float) -> None:
    """Raises AssertionError where a run of these arrays ends otherwise than one of the harness."""
    arms = tuple(
        Arm(name=name, engine="e", options=api.EngineOptions(), toggles={}) for name in ("before", "after")
    )
    design = Design(
        name="x", arms=arms, workload=Workload(), blocks=until.looks[-1], until=until, margin=margin
    )
    ended = sequential(pairs, until, margin)
    words = {-1: "is faster", 1: "is slower", 0: "is same", 2: "is undecided"}
    for run, blocks, found in zip(pairs, ended.blocks, ended.verdict, strict=True):
        values: list[Values] = [
            {"before": {"tpot_ms_p50": 5.0}, "after": {"tpot_ms_p50": 5.0 * float(np.exp(each))}}
            for each in run
        ]
        done = next(n for n in range(1, len(run) + 1) if reason_to_stop(design, values[:n]) is not None)
        assert done == blocks, f"{done} trials, not {blocks}"
        if until.rule == "decided":
            reason = reason_to_stop(design, values[:done])
            assert reason is not None
            assert reason.endswith(words[int(found)]), f"{reason}, not {words[int(found)]}"
