"""Times of requests, as metrics.definitions makes metrics of them; requests in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from overlap_bench.harness.common.intervals import Floats, Times
from overlap_bench.harness.metrics.definitions import NS_PER_MS, STATISTICS, TIMES


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that were served, and what definitions.TIMES are made of."""

    frame: pd.DataFrame

    def between(self, start: str, end: str, by: pd.Series | int = 1) -> pd.Series:
        """(end - start) / by of each request, ms; NaN where not both happened. Both are stamps, without their
        _ns, or the "first_" or "last_" of a list of stamps."""
        began, ended = map(self._stamps, (start, end))
        happened = (began >= 0) & (ended >= 0)
        return pd.Series(np.where(happened, (ended - began) / by, np.nan) / NS_PER_MS, index=self.frame.index)

    def gaps(self, stamps: str) -> pd.Series:
        return pd.Series(gaps_ms(self.frame[stamps]))

    @property
    def lags(self) -> pd.Series:
        """The lag of every chunk whose arrival is known, ms; an older run has none."""
        lags = np.concatenate([np.empty(0), *self.frame.get("chunk_lag_ns", ())])
        return pd.Series(lags[lags >= 0] / NS_PER_MS)

    def _stamps(self, name: str) -> Times:
        """-1 where it did not happen, and where an engine or an older run does not say."""
        edge, _, which = name.partition("_")
        if which:
            return edges(self.frame[f"{which}_ns"])[("first", "last").index(edge)]
        found = self.frame.get(f"{name}_ns")
        return np.full(len(self.frame), -1) if found is None else found.to_numpy()


def distributions(served: pd.DataFrame) -> dict[str, Floats]:
    """Samples of each of definitions.TIMES, ms."""
    requests = Requests(served)
    return {name: times.samples(requests).dropna().to_numpy() for name, times in TIMES.items()}


def request_times(served: pd.DataFrame) -> pd.DataFrame:
    """The times that each request has one of, ms, row by row; NaN where one of its ends did not happen."""
    requests = Requests(served)
    found = {name: times.samples(requests) for name, times in TIMES.items() if times.what}
    return pd.DataFrame(found, index=served.index)


def summary(samples: Floats) -> dict[str, float]:
    if samples.size == 0:
        return dict.fromkeys(STATISTICS, np.nan)
    levels = [float(statistic[1:]) for statistic in STATISTICS[1:]]
    values = [samples.mean(), *np.percentile(samples, levels)]
    return {statistic: float(value) for statistic, value in zip(STATISTICS, values, strict=True)}


def open_at_once(starts: Times, ends: Times) -> pd.DataFrame:
    """How many spans are `open` after each start and end, and for how many `ns`, until the next of these. One
    that starts as another ends is not open beside it."""
    times, changes = np.concatenate([ends, starts]), np.repeat([-1, 1], len(starts))
    order = np.argsort(times, kind="stable")  # so an end comes before a start of the same time
    lasted = np.append(np.diff(times[order]), 0)[: len(times)]
    return pd.DataFrame({"open": np.cumsum(changes[order]), "ns": lasted})


def mean_decoding(requests: pd.DataFrame) -> float:
    """Requests between their first chunk and their last, mean over the time in which there is one: the batch
    of a decode step, as far as a client can tell it. NaN where there is none."""
    decoding = open_at_once(*edges(requests["chunk_ns"]))
    decoding = decoding[decoding["open"] > 0]
    lasted = decoding["ns"].sum()
    return float((decoding["open"] * decoding["ns"]).sum() / lasted) if lasted else np.nan


def edges(stamps: pd.Series) -> tuple[Times, Times]:
    """First and last of each list; -1 for an empty one."""
    first = [values[0] if len(values) else -1 for values in stamps]
    last = [values[-1] if len(values) else -1 for values in stamps]
    return np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)


def spans_ns(stamps: pd.Series) -> Times:
    """From the first of each list to its last; 0 for an empty one, and where either is not known."""
    first, last = edges(stamps)
    return np.where((first >= 0) & (last >= 0), last - first, 0)


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
