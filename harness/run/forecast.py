"""How long a run will take, by the boots that are thrown away, which have few rounds and no turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.common.formatting import blocks_of, duration, minutes_of
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run.messages import BlockDone, Event, Foreseen, Observer, Said
from overlap_bench.harness.workload.arrivals import ARRIVALS, NS_PER_S
from overlap_bench.harness.workload.workload import Workload

FEWEST_SEGMENTS = 3  # of a boot: one in three has the longer turns (trial.steps_of_turn)
USUAL = 6  # blocks of a run of a fixed number
SPARE = 1.25  # of the time that is asked for instead: the next boots may be slower
AROUND_S = 12.0  # what bench itself takes before the first boot (imports, k) and after the last trial


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a block take, of all arms together."""

    boots: float  # and their ends, with the warm-up rounds
    round: float
    segment: float


def costs(
    design: Design,
    warmup: Workload,
    boots: float,
    rounds: Sequence[tuple[int, float]],
    requests: pd.DataFrame,
) -> Costs:
    """The costs of a block whose boots and ends take `boots` seconds. `rounds`: index and seconds of those
    that were thrown away, of every arm, below zero those that asked `warmup`; `requests`: of the others."""
    warm = sum(seconds for index, seconds in rounds if index < 0)
    whole = sum(seconds for index, seconds in rounds if index >= 0)
    if not whole:  # this is rather too little: whoever has time for less than that has none
        more = waves(design.workload) / waves(warmup)
        whole = more * warm + len(design.arms) * (span(design.workload) - span(warmup))
    if len(requests):  # a segment takes as long as each arm's requests, one arm after the other
        took = (requests["finished_ns"] - requests["sent_ns"]).groupby(requests["arm"]).mean()
        segment = float(took.sum()) / NS_PER_S
    else:
        segment = warm / waves(warmup)
    return Costs(boots + design.warmup_rounds * warm, whole, segment)


def block_seconds(design: Design, each: Costs) -> float:
    return each.boots + design.rounds * each.round + design.segments * each.segment


def sized(design: Design, each: Costs, left_s: float) -> Design:
    """The design with as many segments, then rounds, of a boot as let all its blocks end within `left_s`
    seconds: no more than it has, and never fewer than three segments and one round."""
    spare = left_s / design.blocks - each.boots
    segments = _between(FEWEST_SEGMENTS, (spare - each.round) / each.segment, design.segments)
    rounds = _between(1, (spare - segments * each.segment) / each.round, design.rounds)
    return msgspec.structs.replace(design, segments=segments, rounds=rounds, aim_s=None)


def _between(least: int, wanted: float, most: int) -> int:
    return max(min(least, most), min(int(wanted), most))


def for_trials(minutes: float) -> float:
    """Seconds that boots and trials have of so many minutes. Of few minutes it is nearly all: a short run has
    little to sum up."""
    return 60 * minutes - min(AROUND_S, 0.05 * 60 * minutes)


def waves(workload: Workload) -> int:
    """How many requests of a closed loop follow each other; 1 where they come by themselves."""
    return ceil(workload.num_requests / (workload.concurrency or workload.num_requests))


def span(workload: Workload) -> float:
    """Seconds from the first request to the last, where that does not depend on the engine."""
    *_, last = ARRIVALS[workload.arrival].offsets(workload, np.random.default_rng(0))
    return max(0.0, last / NS_PER_S)


def announced(foreseen: Foreseen) -> str:
    """When the answer comes, of a run whose blocks are sized by its first boots."""
    design, each = foreseen.design, duration(foreseen.seconds)
    rounds = "1 ordinary round" if design.rounds == 1 else f"{design.rounds} ordinary rounds"
    return (
        f"{blocks_of(design.blocks)} of about {each}, each with {design.segments} interleaved and "
        f"{rounds}: done in about {duration(design.blocks * foreseen.seconds)}"
    )


class NoTime(api.BadSetting):
    """--max-minutes ends a run before a verdict is possible."""


class Clock:
    """Tells when a run has no time for another block: as long as the longest one so far. What the blocks
    found has no part in it, so this is no peeking. `kept`: blocks of it that there are already."""

    def __init__(self, design: Design, kept: int, observe: Observer) -> None:
        self._design, self._kept, self._observe = design, kept, observe
        self._began = self._last = time.monotonic()
        self._longest = 0.0
        self.foreseen: int | None = None  # how many blocks there will be

    def hear(self, event: Event) -> None:
        """Hand an event on; what it means for the end of the run is said with it."""
        if isinstance(event, BlockDone) and event.block < 0:
            self._last = time.monotonic()  # no block has these boots again
        self._observe(event)
        if isinstance(event, Foreseen) and self._design.max_minutes is not None:
            self.foreseen, said = self.forecast(event.seconds)
            self._observe(Said(said))
        elif isinstance(event, Foreseen) and self._design.aim_s is not None:
            self._observe(Said(announced(event)))

    def forecast(self, seconds: float) -> tuple[int, str]:
        """How many blocks there will be, where each other one takes so many seconds; and that in words.
        Raises NoTime where a fresh run has no time for a verdict."""
        design, kept = self._design, self._kept
        assert design.max_minutes is not None
        gone, within = time.monotonic() - self._began, minutes_of(design.max_minutes)
        more = max(0, int((for_trials(design.max_minutes) - gone) / seconds))
        blocks, least = min(design.blocks, kept + more), design.fewest_judged
        first = f"the first boots took {duration(gone)}, a trial will take about {duration(seconds)}"
        all_ = "all " if blocks == design.blocks > 1 else ""
        fit = f"{all_}{blocks_of(blocks)} fit{'s' * (blocks == 1)} into {within}"

        def asking(wanted: int) -> str:
            return f"--max-minutes {_up((gone + (wanted - kept) * seconds) * SPARE / 60):g}"

        if blocks < least and not kept:
            needs = f"a verdict needs {least}" if len(design.arms) > 1 else "there has to be one"
            raise NoTime(f"{fit}, and {needs}: {first}; give it {asking(least)}")
        few = (
            f"; {USUAL}, the usual number, take {asking(USUAL)}" if blocks < min(USUAL, design.blocks) else ""
        )
        return blocks, f"{first}: {fit}{few}"

    def block_done(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def is_up(self) -> bool:
        minutes = self._design.max_minutes
        return minutes is not None and self._last - self._began + self._longest > for_trials(minutes)


def _up(minutes: float) -> float:
    """Two significant digits of it, rounded up: what is asked for has to be enough."""
    digit = 10.0 ** (floor(log10(minutes)) - 1)
    return round(ceil(minutes / digit) * digit, 9)
