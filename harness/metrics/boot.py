"""From records to metrics, for one boot of one arm: its rounds are pooled, a request that failed is in
`failed_requests` and in no other metric, and without a sample a metric is NaN. Percentiles are numpy's
default (linear), as in `vllm bench serve` and roseinfer's benchmark_streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES
from overlap_bench.harness.metrics.definitions import TOLD, phase_metric
from overlap_bench.harness.metrics.requests import (
    distributions,
    goodput,
    peak_concurrency,
    summary,
    throughput,
)
from overlap_bench.harness.metrics.steps import (
    decode_intervals,
    device_busy,
    exposed_host_us,
    phases_us,
    step_ms,
)


def of_boot(
    requests: pd.DataFrame,
    steps: pd.DataFrame,
    rounds: pd.DataFrame,
    device: pd.DataFrame,
    objectives: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """All metrics of one boot but MATCHED, which take several arms.

    `requests`, `steps` and `device` are records.requests_frame, steps_frame and device_frame with a column
    `round`; `rounds` has round, started_ns and ended_ns. Engines without step records have no rows in
    `steps`, those without a record of the device's work none in `device`: the metrics made from them are NaN.
    `objectives` are Design.goodput.
    """
    served = requests[requests["error"] == ""]
    values = {
        f"{name}_{statistic}": value
        for name, samples in distributions(served).items()
        for statistic, value in summary(samples).items()
    }
    values |= throughput(served, rounds)
    values["goodput_req_s"] = goodput(served, rounds, objectives)
    values["peak_concurrency"] = peak_concurrency(requests)
    values["failed_requests"] = float(len(requests) - len(served))
    # What the file of an imported run says of a metric stands in place of what its requests would give (NaN:
    # nothing can be made of them). Such a run has one round in a block.
    told = {name.removeprefix(TOLD): float(rounds[name].iloc[0]) for name in rounds if name.startswith(TOLD)}
    return values | _step_metrics(steps, device) | told


def _step_metrics(steps: pd.DataFrame, device: pd.DataFrame) -> dict[str, float]:
    if steps.empty:
        names = ["step_ms", "exposed_host_us", "device_busy", *map(phase_metric, PHASES)]
        return dict.fromkeys(names, np.nan)
    intervals = decode_intervals(steps)
    return {
        "step_ms": step_ms(intervals),
        "exposed_host_us": exposed_host_us(intervals),
        "device_busy": np.nan if device.empty else device_busy(steps, device),
        **phases_us(steps),
    }
