"""A stored run as one works with it in Python: pandas frames, and the result that is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import factorial
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.analysis.stored import read_block, read_blocks, readable, result
from overlap_bench.harness.metrics import definitions, ranks
from overlap_bench.harness.metrics.block import Values
from overlap_bench.harness.metrics.requests import request_times
from overlap_bench.harness.metrics.steps import decode_intervals, phase_times
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import Manifest, check_whole
from overlap_bench.harness.store.tables import Block

KEYS = ("trial", "arm", "round")
VALUES = ["trial", "arm", *definitions.METRICS]


@dataclass(frozen=True, slots=True)
class Column:
    """`dtype`: "int64", "float64", "text", or "list": an int64 array per row. `unit`: "" for none."""

    dtype: str
    unit: str
    what: str


STAMP = "perf_counter_ns of the machine, one clock for all its processes; -1 where it did not happen"
_KEY_COLUMNS = {
    "trial": Column("int64", "", "number of the trial: one process of each arm, the unit of the statistics"),
    "arm": Column("text", "", '"before" or "after"; of a run of several, the name of the arm'),
    "round": Column("int64", "", "number of the measured round within the boot; warm-ups are not kept"),
}

# A name that ends in "." or "_" stands for all that begin with it. What an engine does not say, an older run
# did not record, or this machine does not have is left out.
COLUMNS: dict[str, dict[str, Column]] = {
    "requests": {
        **_KEY_COLUMNS,
        "request": Column("int64", "", "number within the round, in the order of the due times"),
        "scheduled_ns": Column("int64", "ns", f"when it was due; {STAMP}"),
        "sent_ns": Column("int64", "ns", "the client began to send"),
        "submitted_ns": Column("int64", "ns", "the client had sent"),
        **{name: Column("int64", "ns", what) for name, what in api.STAMPS.items()},
        "chunk_ns": Column("list", "ns", "arrival of each chunk at the client"),
        "chunk_tokens": Column("list", "tokens", "in each chunk; -1 where a server does not say"),
        "chunk_lag_ns": Column("list", "ns", "from a chunk's arrival to its reading; -1 where not known"),
        "token_ns": Column("list", "ns", "when the engine had each token"),
        "finished_ns": Column("int64", "ns", "arrival of the end at the client"),
        "reason": Column("text", "", '"length", "stop", ...; "" for a request that failed'),
        "prompt_tokens": Column("int64", "tokens", "by the engine's count"),
        "completion_tokens": Column("int64", "tokens", "by the engine's count"),
        "digest": Column("text", "", "of the output's token ids, or its text: equal where the outputs are"),
        "error": Column("text", "", '"" for a request that was served'),
        **{
            name: Column("float64", "ms", f"{times.what}; NaN where it failed or one end did not happen")
            for name, times in definitions.TIMES.items()
            if times.what
        },
    },
    "steps": {
        **_KEY_COLUMNS,
        "step": Column("int64", "", "number within the boot"),
        "kind": Column(
            "text", "", '"prefill", "decode", "mixed", or "dropped": nobody wanted any of its rows'
        ),
        "batch": Column("int64", "requests", "in the step"),
        "tokens": Column("int64", "tokens", "computed"),
        "dropped": Column("int64", "requests", "whose token nobody wanted any more"),
        "preempted": Column("int64", "requests", "sent back to the queue to make room"),
        "given": Column("int64", "tokens", "that its requests got; -1: one each"),
        **{
            f"{phase}.{edge}": Column("int64", "ns", f"{edge} of the host's phase {phase}; {STAMP}")
            for phase in api.PHASES
            for edge in ("start", "end")
        },
        "device_start_ns": Column("int64", "ns", "its first program began on the device; or -1"),
        "device_end_ns": Column("int64", "ns", "its last program ended on the device; or -1"),
        "device_ns": Column("int64", "ns", "time in which one of its programs ran; or -1"),
        **{
            f"{name}.": Column("int64", "ns", "the same of each other rank, where the model spans devices")
            for name in ranks.DEVICE
        },
        **{
            definitions.phase_metric(phase): Column("float64", "us", f"what {phase} took; 0 without it")
            for phase in api.PHASES
        },
        "interval_us": Column(
            "float64",
            "us",
            "device end to device end, for one token of each request, where a decode step "
            "follows a decode step; else NaN",
        ),
        "exposed_host_us": Column(
            "float64", "us", "interval - device, for one token: host work that overlap did not hide; or NaN"
        ),
    },
    "rounds": {
        **_KEY_COLUMNS,
        "seed": Column("int64", "", "of its prompts and arrivals, the same for both arms"),
        "position": Column("int64", "", "0 for the arm that ran this round first"),
        "node": Column("text", "", "of a run on a cluster: the node that measured the trial"),
        "started_ns": Column("int64", "ns", f"first due time; {STAMP}"),
        "ended_ns": Column("int64", "ns", "last end of a request"),
        "switches_voluntary.": Column("float64", "", "context switches of a process that it asked for"),
        "switches_forced.": Column("float64", "", "context switches of a process that it did not ask for"),
        "cpu_ms.": Column("float64", "ms", "CPU time of a process of the run"),
        "host_cpu_us_per_step": Column("float64", "us", "CPU time of the engine's process per step"),
        "steal_share": Column("float64", "", "of all CPU time: taken by other virtual machines"),
        "others_share": Column("float64", "", "of all CPU time: used by processes that are not the run's"),
        "loop_us": Column(
            "float64", "us", "a loop of fixed work just before and after, mean of both and of cores"
        ),
        "load_1m": Column("float64", "", "load average over a minute, at the end"),
        "frequency_mhz": Column("float64", "MHz", "of the cores, mean"),
        "memory.": Column("float64", "bytes", "peak, by kind of memory"),
        "counter.": Column("float64", "", "a mechanism counter: how often, or ns or bytes by its name"),
        "skipped.": Column("float64", "", "records of the workload's data that were passed over"),
        "told.": Column(
            "float64",
            "",
            "of an imported run: a metric as its file has it; NaN: not to be made from requests",
        ),
        "gpu_": Column("float64", "", "NVML: clocks (mhz), temperature (c), power (w), throttling, others"),
    },
    "work": {
        **_KEY_COLUMNS,
        "kind": Column("text", "", '"program", "h2d" or "d2h"'),
        "step": Column("int64", "", "that it belongs to; -1 for none"),
        "start_ns": Column("int64", "ns", f"began on the device; {STAMP}"),
        "end_ns": Column("int64", "ns", "ended on the device"),
    },
    "slices": {  # a row for each turn of a segment
        **_KEY_COLUMNS,
        "round": Column("int64", "", "number of the interleaved round within the boot"),
        "turn": Column("int64", "", "number of the arm's turn within it"),
        "first_step": Column("int64", "", "of the turn, counted from the first of the round"),
        "steps": Column("int64", "", "that the turn had"),
        "batch": Column("int64", "requests", "of its first step; -1: not all are decode steps"),
        "tokens": Column("int64", "tokens", "computed in all its steps"),
        "interval_ns": Column("int64", "ns", "device end to device end, mean without the leading steps"),
        "device_ns": Column("int64", "ns", "of the device in one such step, mean"),
        "turn_ns": Column("int64", "ns", "from its begin until all was finished, by its steps"),
        "parked_ns": Column("int64", "ns", "since its turn before"),
        "parked_cpu_ns": Column("int64", "ns", "CPU time that all its processes used meanwhile"),
        "others_ns": Column(
            "int64", "ns", "in the turn, CPU time of others; -1: not told; not of older runs"
        ),
        "delayed_ns": Column("int64", "ns", "in the turn, by bench sensitivity; not of older runs"),
        "part.": Column("float64", "ns", "of interval_ns: metrics/attribution.py; not of older runs"),
        "phase.": Column("float64", "ns", "of a step, what the phase took, mean; not of older runs"),
    },
    "divergences": {  # a row for each output that is not the first arm's
        **_KEY_COLUMNS,
        "request": Column("int64", "", "number within the round"),
        "before": Column("text", "", "name of the first arm"),
        "agreed": Column("list", "", "token ids of the output that both arms agree on"),
        "before_token": Column("int64", "", "the first arm's next token; -1 where its output ends"),
        "after_token": Column("int64", "", "this arm's next token; -1 where its output ends"),
        "before_gap": Column(
            "float64",
            "logits",
            "from the likeliest token to the first arm's, as its model says; NaN: not asked",
        ),
        "after_gap": Column("float64", "logits", "from the likeliest token to this arm's"),
        "near_tie": Column("float64", "logits", "a near-tie where both gaps are below this, by rounding"),
    },
}


@dataclass(frozen=True)  # no slots: frames and `result` are kept once somebody asks for them
class Run:
    """A stored run. The columns of `requests`, `steps`, `rounds`, `work` (what the device did), `slices` (of
    turns) and `divergences` (where outputs differ) are in COLUMNS; a frame that there are no records for has
    no rows, and one that was left out once the run was finished raises StoreError.

    `values` has one row per trial and arm and one float64 column per metric of metrics.METRICS, in its unit:
    what intervals and verdicts are made from. NaN where a trial has no such value.
    """

    folder: Path
    manifest: Manifest
    blocks: Sequence[Block] = field(repr=False)
    values: pd.DataFrame
    read: Sequence[tuple[Block, Values]] = field(repr=False)  # what `values` was made from

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self._frame("requests")

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self._frame("steps")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        return self._frame("rounds")

    @cached_property
    def work(self) -> pd.DataFrame:
        return self._frame("work")

    @cached_property
    def slices(self) -> pd.DataFrame:
        return self._frame("slices")

    @cached_property
    def divergences(self) -> pd.DataFrame:
        return self._frame("divergences")

    def _frame(self, table: str) -> pd.DataFrame:
        if table in self.manifest.left_out:
            check_whole(self.folder, self.manifest)
        return _joined(table, self.blocks, self.manifest.design)

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.manifest.design.arms)

    @cached_property
    def result(self) -> Result:
        """What the run found, made again from the trials. Raises StoreError for
        a run that is not finished: a verdict now would be peeking."""
        return result(self.folder, self.manifest, self.read)

    @property
    def effects(self) -> pd.DataFrame:
        """A factorial's effects: one row per metric and effect. metric, effect ("h2d", "h2d × output"), where
        ("alone", "with_others", "average" or "together"), change, ci_low, ci_high (fractions), sd, p,
        p_adjusted, verdict. Raises BadSetting for another run."""
        if self.result.factorial is None:
            raise api.BadSetting(f"{self.folder} is not a factorial, so it has no effects")
        columns = ["metric", "effect", "where", *factorial.CSV_COLUMNS]
        return pd.DataFrame(factorial.rows(self.result.factorial)).reindex(columns=columns)


def load(run: str | Path) -> Run:
    """A stored run, finished or not: every whole trial of it. Raises StoreError."""
    folder = Path(run)
    manifest = readable(folder)
    design = manifest.design
    if manifest.left_out:
        measured = tables.read_values(folder, [arm.name for arm in design.arms])
        read, values = [], measured.rename(columns={"block": "trial"}).reindex(columns=VALUES)
        blocks = [read_block(folder, number, design) for number in tables.finished_blocks(folder)]
    else:
        read = list(read_blocks(folder, design))
        values = _values(read, design)
        blocks = [block for block, _ in read]
    return Run(folder, manifest, blocks, values, read)


def _joined(table: str, blocks: Sequence[Block], design: Design) -> pd.DataFrame:
    """A table of all trials, with `trial` in front and with the columns that are made from others."""
    parts = []
    for block in blocks:
        for arm in design.arms:
            part = block.of(arm.name, table)
            if len(part):
                derived = DERIVED.get(table, lambda frame: frame)(part)
                parts.append(pd.concat([pd.Series(block.number, part.index, name="trial"), derived], axis=1))
    if not parts:
        return pd.DataFrame(columns=[name for name in COLUMNS[table] if not name.endswith((".", "_"))])
    joined = pd.concat(parts, ignore_index=True)
    return joined[[*KEYS, *(name for name in joined if name not in KEYS)]]


def _with_times(requests: pd.DataFrame) -> pd.DataFrame:
    served = requests[requests["error"] == ""]
    return pd.concat([requests, request_times(served).reindex(requests.index)], axis=1)


def _with_phases(steps: pd.DataFrame) -> pd.DataFrame:
    intervals = decode_intervals(steps).reindex(steps.index)
    interval_us = intervals["interval_ns"] / definitions.NS_PER_US
    exposed_us = interval_us - intervals["device_ns"] / definitions.NS_PER_US
    joined = pd.concat([steps, phase_times(steps)], axis=1)
    return joined.assign(interval_us=interval_us, exposed_host_us=exposed_us)


def _as_floats(rounds: pd.DataFrame) -> pd.DataFrame:
    """One dtype for what some arms count and others do not."""
    whole = [name for name, column in COLUMNS["rounds"].items() if column.dtype != "float64"]
    return rounds.astype({name: np.float64 for name in rounds if name not in whole})


DERIVED = {"requests": _with_times, "steps": _with_phases, "rounds": _as_floats}


def _values(read: Sequence[tuple[Block, Values]], design: Design) -> pd.DataFrame:
    rows: list[Mapping[str, Any]] = []
    for block, values in read:
        rows += [{"trial": block.number, "arm": arm.name, **values[arm.name]} for arm in design.arms]
    return pd.DataFrame(rows).reindex(columns=VALUES)
