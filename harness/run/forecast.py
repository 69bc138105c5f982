"""How long a block will take, by the one that is thrown away: it has all boots, few rounds, and no turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.workload.arrivals import ARRIVALS, NS_PER_S
from overlap_bench.harness.workload.workload import Workload

FEWEST_SEGMENTS = 3  # of a boot: one in three has the longer turns (blocks.steps_of_turn)


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
    """What a block takes."""
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


def waves(workload: Workload) -> int:
    """How many requests of a closed loop follow each other; 1 where they come by themselves."""
    return ceil(workload.num_requests / (workload.concurrency or workload.num_requests))


def span(workload: Workload) -> float:
    """Seconds from the first request to the last, where that does not depend on the engine."""
    *_, last = ARRIVALS[workload.arrival].offsets(workload, np.random.default_rng(0))
    return max(0.0, last / NS_PER_S)
