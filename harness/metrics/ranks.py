"""Times of each rank of a model that spans several devices, from the step records of the first one.

The columns device_start_ns, device_end_ns and device_ns of a steps frame are the first rank's; the same names
with ".1", ".2" behind them are the others'. An all-reduce in a program ends on no rank before all have begun
that program. So from its own start to the last rank's a device waits: that is `waiting`. Where a rank is slow
in the middle of a program, the others wait there too, and no stamp tells: it counts as device time on all.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from overlap_bench.harness.common.intervals import Times
from overlap_bench.harness.metrics.definitions import NS_PER_US
from overlap_bench.harness.metrics.steps import decode_intervals, device_busy, exposed_host_us

DEVICE = ("device_start_ns", "device_end_ns", "device_ns")
TIMES = ("exposed_host_us", "device_busy", "waiting_us")
OTHER = f"{DEVICE[0]}."


def count(steps: pd.DataFrame) -> int:
    """How many ranks the records are of."""
    others = [name for name in steps if name.startswith(OTHER)]
    return 1 + sum(bool(steps[name].notna().any()) for name in others)


def of_rank(steps: pd.DataFrame, rank: int) -> pd.DataFrame:
    """The same steps with the device's times of that rank, as metrics.steps wants them."""
    if rank == 0:
        return steps
    return steps.assign(**{name: _stamps(steps, f"{name}.{rank}") for name in DEVICE})


def programs(steps: pd.DataFrame) -> pd.DataFrame:
    """The programs of steps of one program each, as metrics.steps.device_busy wants them."""
    ran = steps[steps["device_end_ns"] >= 0]
    return pd.DataFrame(
        {
            "kind": "program",
            "round": ran["round"],
            "step": ran["step"],
            "start_ns": ran["device_start_ns"],
            "end_ns": ran["device_end_ns"],
        }
    )


def times(steps: pd.DataFrame, work: pd.DataFrame) -> list[dict[str, float]]:
    """For each rank, by TIMES: exposed_host_us and device_busy as of metrics.steps, and waiting_us, the mean
    over decode steps of what its device waited for the last rank's. `work` is the first rank's device_frame.
    """
    last, found = np.maximum(own_start(steps, work), last_start(steps)), []
    for rank in range(count(steps)):
        own = of_rank(steps, rank)
        ran = programs(own) if rank else work
        waited = _waiting(own_start(own, ran), last, own["device_end_ns"].to_numpy())
        decode = (own["kind"] == "decode").to_numpy() & (own["device_end_ns"] >= 0).to_numpy()
        found.append(
            {
                "exposed_host_us": exposed_host_us(decode_intervals(own)),
                "device_busy": device_busy(own, ran),
                "waiting_us": float(waited[decode].mean()) / NS_PER_US if decode.any() else np.nan,
            }
        )
    return found


def last_start(steps: pd.DataFrame) -> Times:
    """When the last of the other ranks began each step's program; -1 where there is none."""
    starts = [_stamps(steps, f"{OTHER}{rank}") for rank in range(1, count(steps))]
    return np.max(starts, axis=0) if starts else np.full(len(steps), -1, np.int64)


def own_start(steps: pd.DataFrame, work: pd.DataFrame) -> Times:
    """When the first rank's program of each step began; -1 where it did not. Of two the first is a planted
    delay, and of more the step itself is split into them (graph=off)."""
    if not len(work):
        return _stamps(steps, DEVICE[0])
    begun = work[work["kind"] == "program"].groupby("step")["start_ns"].agg(["size", "min", "max"])
    starts = begun["max"].where(begun["size"] == 2, begun["min"])
    found: Times = starts.reindex(steps["step"], fill_value=-1).to_numpy(np.int64)
    return found


def _waiting(start: Times, last: Times, end: Times) -> Times:
    known = (start >= 0) & (end >= 0)
    return np.where(known, np.clip(np.minimum(last, end) - start, 0, None), 0)


def _stamps(steps: pd.DataFrame, name: str) -> Times:
    """Whole numbers: where other arms have fewer ranks, a table holds their missing ones as NaN."""
    stamps: Times = steps[name].fillna(-1).to_numpy().astype(np.int64)
    return stamps
