"""Metrics of steps: intervals, exposed host time, device busy, phases, and steps at one batch mix.

A decode step here gives each of its requests one token. Where an engine's step gave them several (multi-step
scheduling), its times are shared out among them: else a step of eight tokens would look eight times slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES
from overlap_bench.harness.common import intervals
from overlap_bench.harness.common.intervals import Floats, Times
from overlap_bench.harness.metrics.definitions import METRICS, NS_PER_MS, NS_PER_US, phase_metric


@dataclass(frozen=True, slots=True)
class Steps:
    """The decode step of an arm and of the first one, at that one's batch mix, in its two parts, ms."""

    device: float
    host: float  # exposed
    device_of_first: float
    host_of_first: float


def tokens_each(steps: pd.DataFrame) -> np.ndarray:
    """How many tokens each step gave each request that still wanted some: 1 where nothing else is known, as
    in runs from before it was recorded. float64."""
    if "given" not in steps:
        return np.ones(len(steps))
    given, rows = steps["given"].to_numpy(), (steps["batch"] - steps["dropped"]).to_numpy()
    return np.where((given > 0) & (rows > 0), given / np.maximum(rows, 1), 1.0)


def decode_intervals(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per decode step that directly follows a decode step of its round: batch, interval_ns (device
    end to device end), device_ns, both for one token of each request (`tokens_each`).

    Requests join only by a prefill, so those of such a step were all waiting when the step before it ended:
    what the device idles in between is the host's doing, and never a lack of requests.
    """
    order = np.lexsort((steps["step"], steps["round"]))
    numbers, rounds, ends = (steps[name].to_numpy()[order] for name in ("step", "round", "device_end_ns"))
    decode, known = (steps["kind"] == "decode").to_numpy()[order], ends >= 0
    follows = (rounds[1:] == rounds[:-1]) & (numbers[1:] == numbers[:-1] + 1)
    steady = np.flatnonzero(follows & decode[1:] & decode[:-1] & known[1:] & known[:-1]) + 1
    rows = order[steady]
    interval, device = ends[steady] - ends[steady - 1], steps["device_ns"].to_numpy()[rows]
    each = tokens_each(steps)[rows]
    if (each != 1).any():
        interval, device = interval / each, device / each
    return pd.DataFrame(
        {"batch": steps["batch"].to_numpy()[rows], "interval_ns": interval, "device_ns": device},
        index=steps.index[rows],
    )


def exposed_host_us(intervals: pd.DataFrame) -> float:
    """Host work that overlap failed to hide: mean over decode_intervals of step interval - device execution
    of that step, us. Zero would mean no gap between two programs; the emulated device itself needs about 80
    us of it. Gaps inside an eager step count: the device waited there too."""
    return _mean(intervals["interval_ns"] - intervals["device_ns"]) / NS_PER_US


def round_step_ms_mean(steps: pd.DataFrame) -> float:
    """Mean over all decode steps of the time from the end of the step before it, of whatever kind, to its own
    end, both on the device, ms.

    These are the steps of phases_us, so that a phase over this is its share of the same time. step_ms would
    not do: it is a median, and leaves out the decode steps that follow a prefill.
    """
    ordered = steps.sort_values(["round", "step"])
    ends = ordered["device_end_ns"]
    before = ends.groupby(ordered["round"]).shift(fill_value=-1)
    known = (ordered["kind"] == "decode") & (ends >= 0) & (before >= 0)
    return _mean_of_tokens((ends - before)[known].to_numpy(), tokens_each(ordered)[known]) / NS_PER_MS


def device_busy(steps: pd.DataFrame, device: pd.DataFrame) -> float:
    """Union of executing programs over wall time, from the start of a round's first decode step on the
    device to the end of its last, rounds pooled; copies do not count."""
    decode = ((steps["kind"] == "decode") & (steps["device_start_ns"] >= 0)).to_numpy()
    numbers, first, last = (
        steps[name].to_numpy()[decode] for name in ("round", "device_start_ns", "device_end_ns")
    )
    program = (device["kind"] == "program").to_numpy()
    starts, ends, rounds = (device[name].to_numpy()[program] for name in ("start_ns", "end_ns", "round"))
    covered = wall = 0
    for number in np.unique(numbers):
        of_round, mine = numbers == number, rounds == number
        start, end = int(first[of_round].min()), int(last[of_round].max())
        covered += intervals.length(starts[mine].clip(start, end), ends[mine].clip(start, end))
        wall += end - start
    return covered / wall if wall else np.nan


def phases_us(steps: pd.DataFrame) -> dict[str, float]:
    """Mean of each phase per decode step, us."""
    decode = (steps["kind"] == "decode").to_numpy()
    each = tokens_each(steps)[decode]
    return {
        name: _mean_of_tokens(spent[decode], each) / NS_PER_US for name, spent in _phases_ns(steps).items()
    }


def phase_times(steps: pd.DataFrame) -> pd.DataFrame:
    """What each phase took in each step, us, row by row, by the names of the metrics."""
    return pd.DataFrame(_phases_ns(steps), index=steps.index) / NS_PER_US


def _phases_ns(steps: pd.DataFrame) -> dict[str, Floats]:
    """0 where a step has no such phase: so they add up, and one that a toggle removes goes to 0."""
    return {phase_metric(phase): np.nan_to_num(phase_ns(steps, phase)) for phase in PHASES}


def phase_ns(steps: pd.DataFrame, phase: str) -> Floats:
    """What a phase took in each step, ns; NaN in a step without it."""
    start, end = steps[f"{phase}.start"].to_numpy(), steps[f"{phase}.end"].to_numpy()
    return np.where((start >= 0) & (end >= 0), end - start, np.nan)


def steps_matched(before_steps: pd.DataFrame, *others: pd.DataFrame) -> tuple[dict[str, float], ...]:
    """Decode step time of each arm, ms, standardised to the before arm's batch mix: the metrics `of_rounds`.

    In open loop a faster arm runs smaller batches, which flatters its steps. So: the mean step interval
    (decode_intervals) for each batch size, averaged over batch sizes with the before arm's number of steps
    as weights. Means, not medians: weighted, they add up to the time the same mix of steps takes, and a
    change that pays for common steps with rare slow ones gains nothing. A batch size that one of the arms
    never ran is left out of all, for there is nothing to compare it with; the weights of the others stay.
    NaN for all where no batch size is shared.

    The changes of round_step_ms_same_device and _same_host, as shares of the before arm's step, add up to
    that of round_step_ms exactly: so much bookkeeping. In a serial loop, where the host waits for the device
    and then the device for the host, round_step_ms_same_device is also what the step would take had the
    device been as fast in both arms, without the noise of its clocks and neighbours. Where the host computes
    while the device does and is the slower of the two, it is not: its exposed time is then its own less the
    device's, and what a device gains it seems to lose (stats.md).
    """
    arms = [decode_intervals(steps) for steps in (before_steps, *others)]
    means = matched_means(arms, ["interval_ns", "device_ns"])
    device = [float(mean["device_ns"]) / NS_PER_MS for mean in means]
    exposed = [float(mean["interval_ns"] - mean["device_ns"]) / NS_PER_MS for mean in means]
    parts = [Steps(*own, device[0], exposed[0]) for own in zip(device, exposed, strict=True)]
    made = {name: each.of_rounds for name, each in METRICS.items() if each.of_rounds}
    return tuple({name: make(each) for name, make in made.items()} for each in parts)


def matched_means(arms: Sequence[pd.DataFrame], columns: list[str]) -> list[pd.Series]:
    """Mean of each column per arm, at the first arm's batch mix; a row of a frame is a step of a `batch`."""
    batches = [arm["batch"].to_numpy() for arm in arms]
    shared = reduce(np.intersect1d, batches[1:], np.unique(batches[0]))
    if not len(shared):
        return [pd.Series(np.nan, index=columns) for _ in arms]
    found, weights = [], None
    for arm, own in zip(arms, batches, strict=True):
        at = np.searchsorted(shared, own).clip(max=len(shared) - 1)
        known = shared[at] == own
        counts = np.bincount(at[known], minlength=len(shared))
        weights = counts if weights is None else weights  # the first arm's
        means = [np.bincount(at[known], arm[name].to_numpy()[known]) / counts for name in columns]
        found.append(pd.Series(np.average(means, axis=1, weights=weights), index=columns))
    return found


def matched_share(arms: Sequence[pd.DataFrame]) -> list[float]:
    """The share of each arm's steps (frames as of `matched_means`) whose batch every arm had: what the
    matched means are made of. NaN for an arm without steps."""
    shared = set.intersection(*(set(arm["batch"].unique()) for arm in arms))
    return [_mean(arm["batch"].isin(shared)) for arm in arms]


def _mean_of_tokens(values: Times | Floats, each: Floats) -> float:
    """What one token of each request took: all of it, by all of them."""
    return float(values.sum() / each.sum()) if len(values) else np.nan


def _mean(values: pd.Series) -> float:
    """NaN, without a warning, where there are none."""
    return float(values.mean()) if len(values) else np.nan
