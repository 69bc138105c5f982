"""From the tables of a block to one value per metric and arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd

from overlap_bench.harness.metrics.boot import of_boot
from overlap_bench.harness.metrics.slices import step_sliced
from overlap_bench.harness.metrics.steps import steps_matched

OFFERED = "offered_req_s"  # kept beside the metrics: the rate of the arrivals
Rows = Callable[[str, str], pd.DataFrame]  # of an arm, from a table of the block
Values = Mapping[str, Mapping[str, float]]  # arm → metric → the value of one block


def of_block(
    rows: Rows, arms: Sequence[str], objectives: Mapping[str, float] = MappingProxyType({})
) -> dict[str, dict[str, float]]:
    """arm → metric → the value of one block; OFFERED with them. `objectives` are Design.goodput."""
    found = {}
    steps = {arm: rows(arm, "steps") for arm in arms}
    for arm in arms:
        requests, rounds, work = (rows(arm, name) for name in ("requests", "rounds", "work"))
        found[arm] = of_boot(requests, steps[arm], rounds, work, objectives)
        found[arm][OFFERED] = offered_rate(requests)
    between = _between(steps, rows)
    return {arm: values | between[arm] for arm, values in found.items()}


def values_between(rows: Rows, arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """The metrics of each of these arms that are made of all of them."""
    return _between({arm: rows(arm, "steps") for arm in arms}, rows)


def _between(steps: Mapping[str, pd.DataFrame], rows: Rows) -> dict[str, dict[str, float]]:
    """definitions.MATCHED of each arm, by the batches that all of them had, and what they have in turns. None
    of an arm alone, nor where one of them has no step records, or took no turns."""
    slices = {arm: rows(arm, "slices") for arm in steps}
    found: dict[str, dict[str, float]] = {arm: {} for arm in steps}
    for tables, values in ((steps, steps_matched), (slices, step_sliced)):
        if len(tables) > 1 and all(map(len, tables.values())):
            for arm, more in zip(tables, values(*tables.values()), strict=True):
                found[arm] |= more
    return found


def offered_rate(requests: pd.DataFrame) -> float:
    """Requests due per second, from the first due time of each round to its last; infinite where they are due
    all at once."""
    due = requests.groupby("round")["scheduled_ns"]
    seconds = float((due.max() - due.min()).sum()) / 1e9
    return (len(requests) - due.ngroups) / seconds if seconds else np.inf
