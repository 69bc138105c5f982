"""How long a block will take, by the one that is thrown away: it has all boots, few rounds, and no turns."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import pandas as pd

from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.workload.arrivals import ARRIVALS, NS_PER_S
from overlap_bench.harness.workload.workload import Workload


def block_seconds(
    design: Design,
    warmup: Workload,
    boots: float,
    rounds: Sequence[tuple[int, float]],
    requests: pd.DataFrame,
) -> float:
    """What a block takes whose boots and ends take `boots` seconds. `rounds`: index and seconds of those that
    were thrown away, of every arm, below zero those that asked `warmup`; `requests`: of the others."""
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
    return boots + design.warmup_rounds * warm + design.rounds * whole + design.segments * segment


def waves(workload: Workload) -> int:
    """How many requests of a closed loop follow each other; 1 where they come by themselves."""
    return ceil(workload.num_requests / (workload.concurrency or workload.num_requests))


def span(workload: Workload) -> float:
    """Seconds from the first request to the last, where that does not depend on the engine."""
    *_, last = ARRIVALS[workload.arrival].offsets(workload, np.random.default_rng(0))
    return max(0.0, last / NS_PER_S)
