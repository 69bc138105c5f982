"""From records to metrics: pure functions, one number per metric for one boot of one arm.

The rounds of a boot are pooled. The frames are those of records.py with a column `round`. A request that
failed is counted in `failed_requests` and is in no other metric. Without a sample a metric is NaN.
Percentiles are numpy's default (linear), as in `vllm bench serve` and roseinfer's benchmark_streaming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from engines.api import PHASES
from harness.trace import intervals

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
NS_PER_MS = 1e6
NS_PER_US = 1e3
NS_PER_S = 1e9
TOLD = "told."  # prefix of columns of `rounds` that each hold a metric ready-made

STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Metric:
    """`better`: "lower", "higher", or "" where neither is. What can be zero is compared by difference."""

    name: str
    unit: str
    better: str
    can_be_zero: bool

    @property
    def is_time(self) -> bool:
        return self.unit in ("ms", "us", "s")


# Times with a distribution, ms; each gets one metric per STATISTICS. True: can be zero.
DISTRIBUTIONS = {
    "submit_lag_ms": True,
    "client_lag_ms": True,
    "add_request_ms": True,
    "tokenize_ms": True,
    "queue_wait_ms": True,
    "prefill_first_ms": False,
    "ttft_ms": False,
    "ttft_scheduled_ms": False,
    "tpot_ms": False,
    "itl_chunk_ms": False,
    "itl_token_ms": False,
    "latency_ms": False,
}


# Of several arms at one batch mix; `steps_matched` says what each holds.
SAME_DEVICE, SAME_HOST = "step_ms_same_device", "step_ms_same_host"
MATCHED = ("step_ms_matched", SAME_DEVICE, SAME_HOST)


def phase_metric(phase: str) -> str:
    """The name of a phase's metric: "wait.copy_done" is phase_wait_copy_done_us."""
    return f"phase_{phase.replace('.', '_')}_us"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *(
            Metric(f"{name}_{statistic}", "ms", "lower", can_be_zero)
            for name, can_be_zero in DISTRIBUTIONS.items()
            for statistic in STATISTICS
        ),
        Metric("throughput_tok_s", "tok/s", "higher", False),
        Metric("throughput_total_tok_s", "tok/s", "higher", False),
        Metric("throughput_req_s", "req/s", "higher", False),
        Metric("goodput_req_s", "req/s", "higher", False),
        Metric("peak_concurrency", "requests", "", False),
        Metric("failed_requests", "requests", "lower", True),
        Metric("step_ms", "ms", "lower", False),
        *(Metric(name, "ms", "lower", False) for name in MATCHED),
        Metric("exposed_host_us", "us", "lower", True),
        Metric("device_busy", "", "higher", False),
        *(Metric(phase_metric(phase), "us", "lower", True) for phase in PHASES),
    )
}


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
    return values | _step_metrics(steps, device) | _told(rounds)


def _told(rounds: pd.DataFrame) -> dict[str, float]:
    """What the file of an imported run says of a metric, in place of what its requests would give (NaN:
    nothing can be made of them). Such a run has one round in a block."""
    told = [name for name in rounds if name.startswith(TOLD)]
    return {name.removeprefix(TOLD): float(rounds[name].iloc[0]) for name in told}


def _step_metrics(steps: pd.DataFrame, device: pd.DataFrame) -> dict[str, float]:
    names = ["step_ms", "exposed_host_us", "device_busy", *map(phase_metric, PHASES)]
    if steps.empty:
        return dict.fromkeys(names, np.nan)
    intervals = decode_intervals(steps)
    return {
        "step_ms": step_ms(intervals),
        "exposed_host_us": exposed_host_us(intervals),
        "device_busy": np.nan if device.empty else device_busy(steps, device),
        **phases_us(steps),
    }


# ---------------------------------------------------------------------------------------------------------
# Requests


def distributions(served: pd.DataFrame) -> dict[str, Floats]:
    """Samples of each of DISTRIBUTIONS, ms: one per request (request_times), but one per gap for the ITLs and
    one per chunk for the client lag.

    itl_chunk         gaps between the chunks of a request, whatever they hold: one sample a chunk   vLLM
    itl_token         gaps between the tokens of a request in the engine                        roseinfer
    client_lag        from the arrival of a chunk's last byte (the kernel's stamp) to its reading
    """
    samples = {name: values.dropna().to_numpy() for name, values in request_times(served).items()}
    samples["itl_chunk_ms"] = _gaps(served["chunk_ns"]) / NS_PER_MS
    samples["itl_token_ms"] = _gaps(served["token_ns"]) / NS_PER_MS
    samples["client_lag_ms"] = _lags(served) / NS_PER_MS
    return {name: samples[name] for name in DISTRIBUTIONS}


def request_times(served: pd.DataFrame) -> pd.DataFrame:
    """The times of each request, ms, row by row; NaN where one of its ends did not happen.

    submit_lag        max(0, sent - scheduled)                          roseinfer
    add_request       submitted - sent: the send call at the client     roseinfer
    tokenize          tokenized - accepted                              roseinfer
    queue_wait        admitted - tokenized                              roseinfer, "post-tok"
    prefill_first     first token in the engine - admitted              roseinfer
    ttft              first chunk at the client - sent                  vLLM
    ttft_scheduled    first chunk at the client - scheduled: includes what a late client would hide
                      (coordinated omission)
    tpot              (last chunk - first chunk) / (completion tokens - 1), where there is more than one
                      token; both at the client                         vLLM: (latency - TTFT) / (n - 1),
                      where its latency ends with the last chunk that holds a token. roseinfer's, from
                      the engine's stamps, is the mean of the request's own itl_token
    latency           end at the client - sent                          roseinfer
    """
    scheduled, sent, submitted, accepted, tokenized, admitted, finished = (
        served[f"{name}_ns"].to_numpy()
        for name in ("scheduled", "sent", "submitted", "accepted", "tokenized", "admitted", "finished")
    )
    first_token, _ = _edges(served["token_ns"])
    first_chunk, last_chunk = _edges(served["chunk_ns"])
    tokens = served["completion_tokens"].to_numpy()
    several = (tokens > 1) & (first_chunk >= 0)
    times = {
        "submit_lag_ms": np.maximum(0.0, _between(scheduled, sent)),
        "add_request_ms": _between(sent, submitted),
        "tokenize_ms": _between(accepted, tokenized),
        "queue_wait_ms": _between(tokenized, admitted),
        "prefill_first_ms": _between(admitted, first_token),
        "ttft_ms": _between(sent, first_chunk),
        "ttft_scheduled_ms": _between(scheduled, first_chunk),
        "tpot_ms": np.where(several, (last_chunk - first_chunk) / np.maximum(1, tokens - 1), np.nan),
        "latency_ms": _between(sent, finished),
    }
    return pd.DataFrame({name: values / NS_PER_MS for name, values in times.items()}, index=served.index)


def summary(samples: Floats) -> dict[str, float]:
    """STATISTICS of samples."""
    if samples.size == 0:
        return dict.fromkeys(STATISTICS, np.nan)
    levels = [float(statistic[1:]) for statistic in STATISTICS[1:]]
    values = [samples.mean(), *np.percentile(samples, levels)]
    return {statistic: float(value) for statistic, value in zip(STATISTICS, values, strict=True)}


def throughput(served: pd.DataFrame, rounds: pd.DataFrame) -> dict[str, float]:
    """Tokens and requests served per second of the rounds, each from its first due time to its last end.

    vLLM's: over the wall duration of the benchmark. roseinfer divides by last finish - first submit, which
    differs by the lag of the first request. In open loop below capacity this is the offered load.
    """
    seconds = np.nan if served.empty else _wall_seconds(rounds)
    completion = int(served["completion_tokens"].sum())
    prompts = served["prompt_tokens"]
    prompt = np.nan if (prompts < 0).any() else int(prompts.sum())  # a server need not say
    return {
        "throughput_tok_s": completion / seconds,
        "throughput_total_tok_s": (completion + prompt) / seconds,
        "throughput_req_s": len(served) / seconds,
    }


def goodput(served: pd.DataFrame, rounds: pd.DataFrame, objectives: Mapping[str, float]) -> float:
    """Requests per second that stayed within every objective, over the same time as throughput.

    `vllm bench serve --goodput`: TTFT, TPOT and latency as they are defined above, each at most its number of
    ms; a request of one token has no TPOT and meets any. Requests that failed are not good. NaN without
    objectives.
    """
    if not objectives:
        return np.nan
    times = request_times(served)
    good = times["ttft_ms"].notna()
    for name, most_ms in objectives.items():
        good &= ~(times[f"{name}_ms"] > most_ms)  # NaN is no more than it: one token has no TPOT
    return int(good.sum()) / _wall_seconds(rounds)


def _wall_seconds(rounds: pd.DataFrame) -> float:
    """From the first due time of each round to its last end, all rounds; NaN for none."""
    seconds = float((rounds["ended_ns"] - rounds["started_ns"]).sum()) / NS_PER_S
    return seconds if seconds > 0 else np.nan


def peak_concurrency(requests: pd.DataFrame) -> float:
    """Most requests in flight at the client at one time, from send to end; failed ones are in flight too."""
    if requests.empty:
        return np.nan
    times = np.concatenate([requests["finished_ns"].to_numpy(), requests["sent_ns"].to_numpy()])
    changes = np.repeat([-1, 1], len(requests))
    order = np.argsort(times, kind="stable")  # stable: an end and a send at one time are not both in flight
    return float(np.cumsum(changes[order]).max())


def _between(start: Int64s, end: Int64s) -> Floats:
    """end - start, ns; NaN where not both happened: an engine that does not say when it did a thing leaves
    -1."""
    happened = (start >= 0) & (end >= 0)
    return np.where(happened, end - start, np.nan)


def _edges(stamps: pd.Series) -> tuple[Int64s, Int64s]:
    """First and last of each list; -1 for an empty one."""
    first = [values[0] if len(values) else -1 for values in stamps]
    last = [values[-1] if len(values) else -1 for values in stamps]
    return np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def _lags(served: pd.DataFrame) -> Floats:
    """Of every chunk whose arrival is known, ns; an older run has none."""
    lags = np.concatenate([np.empty(0), *served.get("chunk_lag_ns", ())])
    return lags[lags >= 0]


def _gaps(stamps: pd.Series) -> Floats:
    """Gaps within each list, pooled, ns; none to or from a stamp that is not known."""
    gaps = (np.diff(values)[(values[1:] >= 0) & (values[:-1] >= 0)] for values in map(np.asarray, stamps))
    return np.concatenate([np.empty(0), *gaps])


# ---------------------------------------------------------------------------------------------------------
# Steps


def decode_intervals(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per decode step that directly follows a decode step of its round: batch, interval_ns (device
    end to device end), device_ns.

    Requests join only by a prefill, so those of such a step were all waiting when the step before it ended:
    what the device idles in between is the host's doing, and never a lack of requests.
    """
    order = np.lexsort((steps["step"], steps["round"]))
    numbers, rounds, ends = (steps[name].to_numpy()[order] for name in ("step", "round", "device_end_ns"))
    decode, known = (steps["kind"] == "decode").to_numpy()[order], ends >= 0
    follows = (rounds[1:] == rounds[:-1]) & (numbers[1:] == numbers[:-1] + 1)
    steady = np.flatnonzero(follows & decode[1:] & decode[:-1] & known[1:] & known[:-1]) + 1
    rows = order[steady]
    return pd.DataFrame(
        {
            "batch": steps["batch"].to_numpy()[rows],
            "interval_ns": ends[steady] - ends[steady - 1],
            "device_ns": steps["device_ns"].to_numpy()[rows],
        },
        index=steps.index[rows],
    )


def exposed_host_us(intervals: pd.DataFrame) -> float:
    """Host work that overlap failed to hide: mean over decode_intervals of step interval - device execution
    of that step, us. Zero would mean no gap between two programs; the emulated device itself needs about 80
    us of it. Gaps inside an eager step count: the device waited there too."""
    return _mean(intervals["interval_ns"] - intervals["device_ns"]) / NS_PER_US


def step_ms(intervals: pd.DataFrame) -> float:
    """Median of decode_intervals, ms."""
    return float(intervals["interval_ns"].median()) / NS_PER_MS


def decode_step_ms_mean(steps: pd.DataFrame) -> float:
    """Mean over all decode steps of the time from the end of the step before it, of whatever kind, to its own
    end, both on the device, ms.

    These are the steps of phases_us, so that a phase over this is its share of the same time. step_ms would
    not do: it is a median, and leaves out the decode steps that follow a prefill.
    """
    ordered = steps.sort_values(["round", "step"])
    ends = ordered["device_end_ns"]
    before = ends.groupby(ordered["round"]).shift(fill_value=-1)
    known = (ordered["kind"] == "decode") & (ends >= 0) & (before >= 0)
    return _mean((ends - before)[known]) / NS_PER_MS


def device_busy(steps: pd.DataFrame, device: pd.DataFrame) -> float:
    """Union of executing programs over wall time, from the start of a round's first decode step on the
    device to the end of its last, rounds pooled; copies do not count."""
    decodes = steps[(steps["kind"] == "decode") & (steps["device_start_ns"] >= 0)]
    programs = device[device["kind"] == "program"]
    starts, ends, rounds = (programs[name].to_numpy() for name in ("start_ns", "end_ns", "round"))
    covered = wall = 0
    for number, decode in decodes.groupby("round"):
        start, end = int(decode["device_start_ns"].min()), int(decode["device_end_ns"].max())
        mine = rounds == number
        covered += intervals.length(starts[mine].clip(start, end), ends[mine].clip(start, end))
        wall += end - start
    return covered / wall if wall else np.nan


def phases_us(steps: pd.DataFrame) -> dict[str, float]:
    """Mean of each phase per decode step, us."""
    spent = _phases_ns(steps[steps["kind"] == "decode"])
    return {name: _mean(values) / NS_PER_US for name, values in spent.items()}


def phase_times(steps: pd.DataFrame) -> pd.DataFrame:
    """What each phase took in each step, us, row by row, by the names of the metrics."""
    return _phases_ns(steps) / NS_PER_US


def _phases_ns(steps: pd.DataFrame) -> pd.DataFrame:
    """A step without the phase has 0, so that the phases of a step add up, and one that a toggle removes
    goes to 0."""
    spent = {}
    for phase in PHASES:
        start, end = steps[f"{phase}.start"].to_numpy(), steps[f"{phase}.end"].to_numpy()
        spent[phase_metric(phase)] = np.where((start >= 0) & (end >= 0), end - start, 0)
    return pd.DataFrame(spent, index=steps.index)


def steps_matched(before_steps: pd.DataFrame, *others: pd.DataFrame) -> tuple[dict[str, float], ...]:
    """Decode step time of each arm, ms, standardised to the before arm's batch mix: MATCHED.

    In open loop a faster arm runs smaller batches, which flatters its steps. So: the mean step interval
    (decode_intervals) for each batch size, averaged over batch sizes with the before arm's number of steps
    as weights. Means, not medians: weighted, they add up to the time the same mix of steps takes, and a
    change that pays for common steps with rare slow ones gains nothing. A batch size that one of the arms
    never ran is left out of all, for there is nothing to compare it with; the weights of the others stay.
    NaN for all where no batch size is shared.

    step_ms_matched       the step: device time + exposed host time (exposed_host_us), each matched so
    step_ms_same_device   the before arm's device time + the arm's own exposed host time: what the step would
                          take if the device had been as fast in both. Clocks and neighbours that change the
                          device's speed, the largest part of the noise on most machines, are not in it; nor
                          is what the change itself does to the device: for that,
    step_ms_same_host     the arm's own device time + the before arm's exposed host time

    The changes of the last two, as shares of the before arm's step, add up to that of the first exactly.
    """
    arms = [decode_intervals(steps) for steps in (before_steps, *others)]
    means = matched_means(arms, ["interval_ns", "device_ns"])
    device = [float(mean["device_ns"]) / NS_PER_MS for mean in means]
    exposed = [float(mean["interval_ns"] - mean["device_ns"]) / NS_PER_MS for mean in means]
    return tuple(
        {
            "step_ms_matched": on_device + on_host,
            SAME_DEVICE: device[0] + on_host,
            SAME_HOST: on_device + exposed[0],
        }
        for on_device, on_host in zip(device, exposed, strict=True)
    )


def matched_means(arms: Sequence[pd.DataFrame], columns: list[str]) -> list[pd.Series]:
    """Mean of each column per arm, at the first arm's batch mix; a row of a frame is a step of a `batch`."""
    means = [arm.groupby("batch")[columns].mean() for arm in arms]
    shared = means[0].index
    for mean in means[1:]:
        shared = shared.intersection(mean.index)
    if shared.empty:
        return [pd.Series(np.nan, index=columns) for _ in arms]
    weights = arms[0]["batch"].value_counts()[shared]
    return [pd.Series(np.average(mean.loc[shared], axis=0, weights=weights), index=columns) for mean in means]


def _mean(values: pd.Series) -> float:
    """NaN, without a warning, where there are none."""
    return float(values.mean()) if len(values) else np.nan
