"""How often `bench bisect` names the wrong commit, beside `git bisect` at equal minutes, by simulation.

    python -m experiments.validation.bisections [RUNS]    2,000 by default: half an hour on two cores

Cases that an earlier call has done are kept.

64 commits, and good and bad that differ by 2%; the SD is that of log(bad / good) in a trial. `git bisect` is
told the effect: it takes a commit for bad where the mean of its trials, each of good and that commit, is
above half of it. It has as many boots as the search had on average, in equal parts for its six steps. Both
are preceded by the same trials of good and bad alone, which are not counted.

"Right": the commits that it names are those with which the level changes, and all of them. Of a change that
came and went, naming one of the three is "in part".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from overlap_bench.harness.stats import bisection
from overlap_bench.harness.stats.bisection import Trial
from overlap_bench.harness.stats.distributions import Floats

COMMITS, EFFECT, MARGIN = 64, 0.02, 0.01
MOST = 200  # trials of a search
EXACT = np.inf
PROFILES = ("one", "none", "two steps", "came and went")


@dataclass(frozen=True, slots=True)
class Case:
    profile: str
    sd: float
    freedom: float = EXACT  # of Student's t, whose noise has this SD all the same

    @property
    def title(self) -> str:
        noise = "" if self.freedom == EXACT else f", t of {self.freedom:g} degrees of freedom"
        return f"{self.profile}, SD {self.sd:.1%}{noise}"


CASES = (
    *(Case("one", sd) for sd in (0.005, 0.01, 0.02)),
    *(Case("one", sd, 3.0) for sd in (0.005, 0.01, 0.02)),
    *(Case("none", sd) for sd in (0.005, 0.01, 0.02)),
    *(Case("two steps", sd) for sd in (0.0025, 0.005, 0.01)),
    *(Case("came and went", sd) for sd in (0.0025, 0.005, 0.01)),
)


@dataclass(frozen=True, slots=True)
class Found:
    """`verdict`: right, in part, wrong, undecided, or equal (ends). `steps`: changes that are likeliest."""

    verdict: str
    steps: int
    ends: int  # trials
    search: int
    claim: float


def levels(profile: str, random: np.random.Generator) -> tuple[Floats, tuple[int, ...]]:
    """The level of each commit, good first, and the places where it changes."""
    found = np.zeros(COMMITS + 1)
    changes = {"one": 1, "none": 0, "two steps": 2, "came and went": 3}[profile]
    places = tuple(sorted(int(each) + 1 for each in random.choice(COMMITS, changes, replace=False)))
    heights = {1: (1.0,), 2: (0.5, 1.0), 3: (1.0, 0.0, 1.0), 0: ()}[changes]
    for place, height in zip(places, heights, strict=True):
        found[place:] = height
    return found, places


def one(case: Case, seed: int) -> Found:
    random = np.random.default_rng([seed, round(1e4 * case.sd), PROFILES.index(case.profile)])
    shape, places = levels(case.profile, random)
    measure = bisection.simulated(random, EFFECT * shape, case.sd / 2**0.5, case.freedom)
    trials: list[Trial] = []
    while (seen := bisection.ends([each.effect for each in trials], MARGIN)).verdict == "open":
        trials.append(measure(0))
    if seen.verdict == "equal":
        return Found("equal", 0, len(trials), 0, 0.0)
    done, known = bisection.search(trials, COMMITS, measure, np.ones(COMMITS + 1), MOST)
    named = {place for place, _ in known.best}
    right = "right" if named == {*places} else "in part" if named < {*places} else "wrong"
    verdict = right if known.found() else "undecided"
    return Found(verdict, len(known.best), len(trials), len(done) - len(trials), known.claim)


def by_git(case: Case, trials: float, runs: int) -> float:
    """The share of wrong commits, of `git bisect` with the boots of so many trials of three arms."""
    random = np.random.default_rng(7)
    steps = int(np.log2(COMMITS))
    pairs = int(trials * 3 / 2)
    each = [max(1, pairs // steps + (step < pairs % steps)) for step in range(steps)]
    wrong = np.zeros(runs, bool)
    for count in each:  # by symmetry, a step errs as often with a good commit as with a bad one
        if case.freedom == EXACT:
            noise = random.standard_normal((runs, count, 2))
        else:
            noise = random.standard_t(case.freedom, (runs, count, 2)) * (1 - 2 / case.freedom) ** 0.5
        means = case.sd / 2**0.5 * (noise[..., 1] - noise[..., 0]).mean(axis=1)
        wrong |= means > EFFECT / 2
    return float(wrong.mean())


def row(case: Case, found: Sequence[Found]) -> tuple[list[str], dict[str, object]]:
    counts = Counter(each.verdict for each in found)
    searched = [each.search for each in found if each.verdict != "equal"]
    mean = float(np.mean(searched)) if searched else 0.0
    claims = counts["right"] + counts["in part"] + counts["wrong"]
    git = by_git(case, mean, 20_000) if case.profile == "one" else None
    data: dict[str, object] = {
        **counts,
        "ends": float(np.mean([each.ends for each in found])),
        "search": mean,
        "git": git,
        "steps": Counter(each.steps for each in found),
    }
    cells = [
        case.title,
        f"{counts['equal'] / len(found):.1%}",
        f"{counts['undecided'] / len(found):.1%}",
        f"{counts['right'] / claims:.1%}" if claims else "",
        f"{counts['in part'] / claims:.1%}" if claims else "",
        f"{counts['wrong'] / len(found):.2%}",
        "" if git is None else f"{git:.1%}",
        f"{data['ends']:.1f}",
        f"{mean:.1f}" if searched else "",
    ]
    return cells, data


def main() -> None:
    runs = command_line.wanted(__file__, __doc__, "RUNS", 2000)
    os.environ["OMP_NUM_THREADS"] = "1"
    data = earlier(__file__)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case in CASES:
            many = runs if case.profile in ("one", "none") else max(1, runs // 10)
            if (case.title, many) in [(each["case"], each["runs"]) for each in data]:
                continue
            found = list(pool.map(partial(one, case), range(many), chunksize=10))
            cells, counts = row(case, found)
            data.append({"case": case.title, "runs": many, "cells": cells, **counts})
            write(data)


def write(data: list[dict[str, Any]]) -> None:
    write_result(
        __file__,
        title=f"Bisections of {COMMITS} commits, {EFFECT:.0%} between good and bad, beside git bisect",
        header=[
            "change, SD of a trial",
            "runs",
            '"nothing to find"',
            "undecided",
            "right where it names",
            "in part",
            "wrong",
            "wrong: git bisect",
            "trials of the ends",
            "trials of the search",
        ],
        rows=[[each["case"], f"{each['runs']:,}", *each["cells"][1:]] for each in data],
        data=data,
    )


if __name__ == "__main__":
    main()
