"""Where the interval of a decode step goes: each nanosecond of it in exactly one of PARTS.

The interval of step N runs from the device's end of N-1 to its end of N (metrics.decode_intervals: both are
decode steps, one directly after the other, so that no request was missing). Each instant of it belongs to
the first of these that fits:

slowest rank        a program executes, and another rank has not begun the same one, which its all-reduces
                    wait for
device              a program executes
turnaround          idle, and N was launched before the device finished N-1: what the device needs between
                    one queued step and the next, its copies and fences included
launch latency      idle, and the launch of N has returned: from there to its start on the device, and gaps
                    between its programs
h2d, launch         idle, and the host is in that phase, on whichever thread launches
hand-over           idle, and N is ready but its launch has not begun, or the scheduler's thread waits in
                    wait.launch_done. Only where a forward thread launches: it has to wake, and to get the
                    GIL
completion latency  idle, and the scheduler's thread is in wait.copy_done: the device is done with the step
                    that is waited for, and the host does not have its ids yet (the copy of the ids, the
                    wake-up, reading them)
append, output, recv, schedule, metadata
                    idle, and the scheduler's thread is in that phase
unattributed        idle, and none of these: code between two phases, or something else on the host's core

So a host phase counts only while the device stands still, `exposed`; what overlap hides is in `device`. All
but the first two add up to metrics.exposed_host_us, less the gaps that other steps' programs fill. There is
no line for idle as such: idle time that has no name is shown as unattributed. Of a model that spans several
devices it is the first rank's interval (metrics/ranks.py has the others').
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from overlap_bench.engines.api import PHASES
from overlap_bench.harness.common.intervals import Times
from overlap_bench.harness.metrics import ranks
from overlap_bench.harness.metrics import steps as steps_
from overlap_bench.harness.metrics.steps import decode_intervals, tokens_each

Spans = tuple[Times, Times]  # starts and ends, ns

ON_SCHEDULER = ("append", "output", "recv", "schedule", "metadata")  # phases that name their own part
PARTS = (
    "slowest rank",
    "device",
    "turnaround",
    "launch latency",
    "h2d",
    "launch",
    "hand-over",
    "completion latency",
    *ON_SCHEDULER,
    "unattributed",
)


@dataclass(frozen=True, slots=True)
class Painted:
    """A stretch of time cut into pieces: piece i runs from edges[i] to edges[i + 1] and has labels[i]."""

    edges: Times  # ascending, n + 1
    labels: Times  # n
    count: int  # labels are 0 to count - 1

    def within(self, starts: Times, ends: Times) -> Times:
        """Time of each label in each window, ns: int64 (windows, count). Windows may overlap; what lies
        outside of the edges has no label."""
        lengths = np.diff(self.edges)
        found = np.zeros((len(starts), self.count), np.int64)
        if not len(lengths):
            return found
        places = [self._place(times) for times in (starts, ends)]
        for label in range(self.count):
            mine = self.labels == label
            before = np.concatenate([[0], np.cumsum(np.where(mine, lengths, 0))])
            upto = [before[piece] + np.where(mine[piece], into, 0) for piece, into in places]
            found[:, label] = upto[1] - upto[0]
        return found

    def _place(self, times: Times) -> tuple[Times, Times]:
        """The piece that each time lies in, and how far into it."""
        times = np.clip(times, self.edges[0], self.edges[-1])
        piece = np.clip(np.searchsorted(self.edges, times, side="right") - 1, 0, len(self.labels) - 1)
        return piece, times - self.edges[piece]


def paint(claims: Sequence[Spans]) -> Painted:
    """Cut time at every edge of `claims`; a piece has the number of the first of them that covers it, and
    len(claims) where none does. Spans of one claim may overlap; empty ones claim nothing."""
    edges = np.unique(np.concatenate([times for claim in claims for times in claim]))
    labels = np.full(max(0, len(edges) - 1), len(claims), np.int64)
    for number in reversed(range(len(claims))):
        starts, ends = claims[number]
        real = ends > starts
        change = np.zeros(len(edges), np.int64)
        np.add.at(change, np.searchsorted(edges, starts[real]), 1)
        np.add.at(change, np.searchsorted(edges, ends[real]), -1)
        labels[np.cumsum(change)[:-1] > 0] = number
    return Painted(edges, labels, len(claims) + 1)


def attribute(steps: pd.DataFrame, work: pd.DataFrame, forward_thread: bool) -> pd.DataFrame:
    """One row per decode interval: batch, interval_ns, and ns in each of PARTS, which add up to it exactly.
    All for one token of each request, as decode_intervals are: an eighth of a step that gave eight.

    `steps` and `work` are records.steps_frame and device_frame of one boot, with a column `round`;
    `forward_thread`: whether a thread of its own launches.
    """
    intervals = decode_intervals(steps)
    chosen = steps.loc[intervals.index]
    ends, each = chosen["device_end_ns"].to_numpy(), tokens_each(chosen)
    starts = ends - np.rint(intervals["interval_ns"].to_numpy() * each).astype(np.int64)
    found = {"interval_ns": ends - starts, **_parts(steps, work, forward_thread, chosen, starts)}
    if (each != 1).any():
        found = {name: values / each for name, values in found.items()}
    return pd.DataFrame({"batch": chosen["batch"].to_numpy(), **found}, index=intervals.index)


def of_each_step(steps: pd.DataFrame, work: pd.DataFrame, forward_thread: bool) -> pd.DataFrame:
    """One row per step that the device ended, by its number, but the first: ns in each of PARTS since the
    device's end of the step before it, whatever that was. Arguments as of `attribute`."""
    ended = steps[steps["device_end_ns"] >= 0].sort_values("step")
    chosen, starts = ended.iloc[1:], ended["device_end_ns"].to_numpy()[:-1]
    return pd.DataFrame(_parts(steps, work, forward_thread, chosen, starts), index=chosen["step"])


def _parts(
    steps: pd.DataFrame, work: pd.DataFrame, forward_thread: bool, chosen: pd.DataFrame, starts: Times
) -> dict[str, Times]:
    """ns in each of PARTS from `starts` to the device's end of each of the chosen steps."""
    ends = chosen["device_end_ns"].to_numpy()
    launched = chosen["launch.end"].to_numpy()
    recorded, queued = launched >= 0, launched <= starts
    programs = work[work["kind"] == "program"] if len(work) else work

    phases = {phase: spans(steps, phase) for phase in PHASES}
    none = np.empty(0, np.int64)
    waiting = (none, none)
    if forward_thread:
        ready, begun = steps["metadata.end"].to_numpy(), steps["h2d.start"].to_numpy()
        happened = (ready >= 0) & (begun >= 0)
        waited = phases["wait.launch_done"]
        waiting = (
            np.concatenate([ready[happened], waited[0]]),
            np.concatenate([begun[happened], waited[1]]),
        )
    own_start = ranks.own_start(steps, programs)
    last_start = np.minimum(ranks.last_start(steps), steps["device_end_ns"].to_numpy())
    claims: dict[str, Spans] = {
        "slowest rank": (own_start, np.where(own_start >= 0, last_start, -1)),
        "device": (programs["start_ns"].to_numpy(), programs["end_ns"].to_numpy())
        if len(programs)
        else (steps["device_start_ns"].to_numpy(), steps["device_end_ns"].to_numpy()),
        "turnaround": (starts[recorded & queued], ends[recorded & queued]),
        "launch latency": (launched[recorded & ~queued], ends[recorded & ~queued]),
        "h2d": phases["h2d"],
        "launch": phases["launch"],
        "hand-over": waiting,
        "completion latency": phases["wait.copy_done"],
        **{phase: phases[phase] for phase in ON_SCHEDULER},
        "unattributed": (starts, ends),
    }
    painted = paint([claims[part] for part in PARTS])  # where two claim a nanosecond, the first has it
    found = painted.within(starts, ends)
    return {part: found[:, number] for number, part in enumerate(PARTS)}


def spans(steps: pd.DataFrame, phase: str) -> Spans:
    """When a phase ran, over all steps in which it did."""
    starts, ends = steps[f"{phase}.start"].to_numpy(), steps[f"{phase}.end"].to_numpy()
    happened = (starts >= 0) & (ends >= 0)
    return starts[happened], ends[happened]


def matched_means(arms: Sequence[pd.DataFrame]) -> list[pd.Series]:
    """Mean of each part and of the interval, us, for each arm at the first one's batch mix, as in
    metrics.round_step_ms: so a part does not shrink just because batches did. NaN where no batch size is
    shared."""
    return [mean / 1e3 for mean in steps_.matched_means(arms, ["interval_ns", *PARTS])]
