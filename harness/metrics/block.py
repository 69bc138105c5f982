"""From the tables of a block to one value per metric and arm.

The rounds of a boot are pooled, a request that failed is in `failed_requests` and in no other metric, and
without a sample a metric is NaN. Percentiles are numpy's default (linear), as in `vllm bench serve` and
roseinfer's benchmark_streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pandas as pd

from overlap_bench.harness.metrics import requests as requests_
from overlap_bench.harness.metrics import steps as steps_
from overlap_bench.harness.metrics.definitions import METRICS, NS_PER_S, TOLD
from overlap_bench.harness.metrics.slices import step_sliced
from overlap_bench.harness.metrics.steps import steps_matched

OFFERED = "offered_req_s"  # kept beside the metrics: the rate of the arrivals
Rows = Callable[[str, str], pd.DataFrame]  # of an arm, from a table of the block
Values = Mapping[str, Mapping[str, float]]  # arm → metric → the value of one block


def of_block(rows: Rows, arms: Sequence[str], objectives: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """arm → metric → the value of one block; OFFERED with them. `objectives` are Design.goodput."""
    found = values_between(rows, arms)
    for arm in arms:
        requests, steps, rounds, work = (rows(arm, name) for name in ("requests", "steps", "rounds", "work"))
        found[arm] |= of_boot(requests, steps, rounds, work, objectives)
        found[arm][OFFERED] = offered_rate(requests)
    return found


def values_between(rows: Rows, arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """What is made of all of these arms: definitions.MATCHED of each, by the batches that all of them had,
    and what they have in turns. None of an arm alone, nor where one of them has no step records, or took no
    turns."""
    found: dict[str, dict[str, float]] = {arm: {} for arm in arms}
    for name, values in (("steps", steps_matched), ("slices", step_sliced)):
        tables = [rows(arm, name) for arm in arms]
        if len(tables) > 1 and all(map(len, tables)):
            for arm, more in zip(arms, values(*tables), strict=True):
                found[arm] |= more
    return found


def offered_rate(requests: pd.DataFrame) -> float:
    """Requests due per second, from the first due time of each round to its last; infinite where they are due
    all at once."""
    due = requests.groupby("round")["scheduled_ns"]
    seconds = float((due.max() - due.min()).sum()) / 1e9
    return (len(requests) - due.ngroups) / seconds if seconds else np.inf


@dataclass(frozen=True)  # no slots: what was computed is kept
class Boot:
    """What was recorded of one boot of one arm, and what several metrics are made of.

    `requests`, `steps` and `device` are records.requests_frame, steps_frame and device_frame with a column
    `round`; `rounds` has round, started_ns and ended_ns. Engines without step records have no rows in
    `steps`, those without a record of the device's work none in `device`. `objectives` are Design.goodput.
    """

    requests: pd.DataFrame
    steps: pd.DataFrame
    rounds: pd.DataFrame
    device: pd.DataFrame
    objectives: Mapping[str, float]

    @cached_property
    def served(self) -> pd.DataFrame:
        return self.requests[self.requests["error"] == ""]

    @cached_property
    def times(self) -> pd.DataFrame:
        """Times that each request has one of, ms."""
        return requests_.request_times(self.served)

    @cached_property
    def summaries(self) -> dict[str, dict[str, float]]:
        """STATISTICS of each of definitions.TIMES, ms."""
        samples = requests_.distributions(self.served)
        return {name: requests_.summary(each) for name, each in samples.items()}

    @cached_property
    def seconds(self) -> float:
        """From the first due time of each round to its last end, all rounds; NaN for none."""
        seconds = float((self.rounds["ended_ns"] - self.rounds["started_ns"]).sum()) / NS_PER_S
        return seconds if seconds > 0 else np.nan

    def total(self, tokens: str) -> float:
        """The sum over requests that were served; NaN where one of them, or a server, does not say."""
        counts = self.served[tokens]
        return np.nan if counts.empty or (counts < 0).any() else float(counts.sum())

    @property
    def in_flight(self) -> pd.Series:
        """Requests in flight at the client, from send to end, after each of both."""
        spans = (self.requests[name].to_numpy() for name in ("sent_ns", "finished_ns"))
        return requests_.open_at_once(*spans)["open"]

    @cached_property
    def intervals(self) -> pd.DataFrame:
        if self.steps.empty:
            return pd.DataFrame(columns=["batch", "interval_ns", "device_ns"], dtype=np.float64)
        return steps_.decode_intervals(self.steps)

    @property
    def exposed_host_us(self) -> float:
        return steps_.exposed_host_us(self.intervals)

    @property
    def busy(self) -> float:
        """The share of the wall time in which the device executed a program."""
        recorded = not (self.steps.empty or self.device.empty)
        return steps_.device_busy(self.steps, self.device) if recorded else np.nan

    @cached_property
    def phases(self) -> dict[str, float]:
        """Mean of each phase per decode step, us; without step records there is none."""
        return {} if self.steps.empty else steps_.phases_us(self.steps)


def of_boot(
    requests: pd.DataFrame,
    steps: pd.DataFrame,
    rounds: pd.DataFrame,
    device: pd.DataFrame,
    objectives: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """All metrics of a Boot; those of BETWEEN_ARMS take several arms."""
    boot = Boot(requests, steps, rounds, device, objectives)
    values = {name: float(each.of_boot(boot)) for name, each in METRICS.items() if each.of_boot}
    # What the file of an imported run says of a metric stands in place of what its requests would give (NaN:
    # nothing can be made of them). Such a run has one round in a block.
    told = {name.removeprefix(TOLD): float(rounds[name].iloc[0]) for name in rounds if name.startswith(TOLD)}
    return values | told
