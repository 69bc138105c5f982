"""Metrics of requests: TTFT, TPOT, ITL, latency, throughput, goodput."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from overlap_bench.harness.metrics.arrays import Floats, Int64s
from overlap_bench.harness.metrics.definitions import DISTRIBUTIONS, NS_PER_MS, NS_PER_S, STATISTICS


def distributions(served: pd.DataFrame) -> dict[str, Floats]:
    """Samples of each of DISTRIBUTIONS, ms: one per request (request_times), but one per gap for the ITLs and
    one per chunk for the client lag.

    itl_chunk         gaps between the chunks of a request, whatever they hold: one sample a chunk   vLLM
    itl_token         gaps between the tokens of a request in the engine                        roseinfer
    client_lag        from the arrival of a chunk's last byte (the kernel's stamp) to its reading
    """
    samples = {name: values.dropna().to_numpy() for name, values in request_times(served).items()}
    samples["itl_chunk_ms"] = gaps_ms(served["chunk_ns"])
    samples["itl_token_ms"] = gaps_ms(served["token_ns"])
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
                      token, and not all came in one chunk; both at the client
                                                                        vLLM: (latency - TTFT) / (n - 1),
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
    several = (tokens > 1) & (first_chunk >= 0) & (last_chunk > first_chunk)
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


def mean_decoding(requests: pd.DataFrame) -> float:
    """Requests between their first chunk and their last, mean over the time in which there is one: the batch
    of a decode step, as far as a client can tell it. NaN where there is none."""
    first, last = _edges(requests["chunk_ns"])
    times, changes = np.concatenate([last, first]), np.repeat([-1, 1], len(first))
    order = np.argsort(times, kind="stable")
    decoding, lasted = np.cumsum(changes[order])[:-1], np.diff(times[order])
    some = decoding > 0
    return float(np.average(decoding[some], weights=lasted[some])) if lasted[some].any() else np.nan


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


def spans_ns(stamps: pd.Series) -> Int64s:
    """From the first of each list to its last; 0 for an empty one, and where either is not known."""
    first, last = _edges(stamps)
    return np.where((first >= 0) & (last >= 0), last - first, 0)


def _lags(served: pd.DataFrame) -> Floats:
    """The lag of every chunk whose arrival is known, ns; an older run has none."""
    lags = np.concatenate([np.empty(0), *served.get("chunk_lag_ns", ())])
    return lags[lags >= 0]


def gaps_ms(stamps: pd.Series) -> Floats:
    """Gaps within each list of ns, pooled, ms; none to or from a stamp that is not known."""
    lists = [np.asarray(each) for each in stamps if len(each)]
    if not lists:
        return np.empty(0)
    joined = np.concatenate(lists)
    within = (joined[1:] >= 0) & (joined[:-1] >= 0)
    within[np.cumsum([len(each) for each in lists])[:-1] - 1] = False  # from one list to the next
    gaps: Floats = np.diff(joined)[within] / NS_PER_MS
    return gaps
