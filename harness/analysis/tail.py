"""What made the late requests late.

Each sample of a metric is a window of time: submit lag from due to sent (client), queue wait from tokenized
to admitted, TTFT from sent to the first chunk (client), ITL from one token of a request to its next (engine).
A window is split by what the scheduler's thread was at: a phase, and the kind of the step it belonged to
(`wait.copy_done (prefill)`: it stood behind a prefill); `between phases` is loop code, admission, or nothing
to do.

The late samples are those at the percentile and above, the typical ones lie between the quartiles; what the
late hold more of each, on average, adds up to how much later they were. All blocks are pooled: this
describes, and has no interval. For submit lag, the client's, it is a cause only where client and engine share
cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES, STEP_KINDS
from overlap_bench.harness.common.intervals import Times
from overlap_bench.harness.metrics.attribution import Painted, paint, spans

TAILS = ("submit_lag_ms", "queue_wait_ms", "ttft_ms", "itl_token_ms")
LEVELS = (95, 99)
NEEDED_SAMPLES = {95: 72, 99: 368}  # for a 95% order-statistic interval of the percentile
KINDS = (*STEP_KINDS, "dropped")
ACTIVITIES = (*(f"{phase} ({kind})" for phase in PHASES for kind in KINDS), "between phases")


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """The late requests of an arm, ms: `percentile`, and means of the typical and the late samples. `causes`:
    (one of ACTIVITIES, how much more of it the late ones hold), the largest first."""

    arm: str
    metric: str
    level: int
    samples: int
    enough: bool
    percentile: float
    typical: float
    late: float
    causes: list[tuple[str, float]]


def windows(requests: pd.DataFrame) -> dict[str, tuple[Times, Times]]:
    """Starts and ends of the samples of each of TAILS, ns; those of metrics.distributions."""
    served = requests[requests["error"] == ""]
    stamps = {
        name: served[f"{name}_ns"].to_numpy() for name in ("scheduled", "sent", "tokenized", "admitted")
    }
    first_chunk = np.array([each[0] if len(each) else -1 for each in served["chunk_ns"]], np.int64)
    tokens = [np.asarray(each, np.int64) for each in served["token_ns"]]
    nothing = [np.empty(0, np.int64)]
    return {
        "submit_lag_ms": (stamps["scheduled"], np.maximum(stamps["scheduled"], stamps["sent"])),
        "queue_wait_ms": _happened(stamps["tokenized"], stamps["admitted"]),
        "ttft_ms": _happened(stamps["sent"], first_chunk),
        "itl_token_ms": _happened(
            np.concatenate(nothing + [each[:-1] for each in tokens]),
            np.concatenate(nothing + [each[1:] for each in tokens]),
        ),
    }


def activity(steps: pd.DataFrame) -> Painted:
    """What the scheduler's thread was at, by number in ACTIVITIES. h2d and launch of a forward thread count
    only where the scheduler's own thread was in no phase."""
    claims = [spans(steps[steps["kind"] == kind], phase) for phase in PHASES for kind in KINDS]
    launching = {"h2d", "launch"}
    order = sorted(range(len(claims)), key=lambda each: PHASES[each // len(KINDS)] in launching)
    painted = paint([claims[each] for each in order])
    names = np.array([*order, len(ACTIVITIES) - 1])
    return Painted(painted.edges, names[painted.labels], len(ACTIVITIES))


def split(requests: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Times]:
    """metric → int64 (samples, ACTIVITIES), ns, of one boot; each row adds up to its sample."""
    painted = activity(steps)
    found = {}
    for metric, (starts, ends) in windows(requests).items():
        parts = painted.within(starts, ends)
        parts[:, -1] += (ends - starts) - parts.sum(axis=1)  # before the first step, behind the last
        found[metric] = parts
    return found


def late(arm: str, metric: str, parts: Sequence[Times], level: int) -> Tail | None:
    """The tail of the pooled samples of an arm's boots; None without a sample."""
    pooled = np.concatenate(list(parts)) / 1e6
    if not len(pooled):
        return None
    totals = pooled.sum(axis=1)
    low, high, percentile = np.percentile(totals, [25, 75, level])
    typical = pooled[(totals >= low) & (totals <= high)]
    tail = pooled[totals >= percentile]
    more = tail.mean(axis=0) - typical.mean(axis=0)
    causes = [(name, float(value)) for name, value in zip(ACTIVITIES, more, strict=True) if value]
    return Tail(
        arm=arm,
        metric=metric,
        level=level,
        samples=len(pooled),
        enough=len(pooled) >= NEEDED_SAMPLES[level],
        percentile=float(percentile),
        typical=float(typical.sum(axis=1).mean()),
        late=float(tail.sum(axis=1).mean()),
        causes=sorted(causes, key=lambda each: -each[1]),
    )


def _happened(starts: Times, ends: Times) -> tuple[Times, Times]:
    both = (starts >= 0) & (ends >= 0)
    return starts[both], ends[both]
