"""What equal processes differ by, where a decode step on the device is all that they run.

    python -m experiments.validation.equal_processes [NAME ...]    all that are not there yet, 10 minutes each

In each of GROUPS groups half are started as ever, and half are of a kind of which something is held still.
All share core 1 and take turns in an order drawn anew for each cycle: a decode step that fills the caches,
and one that is timed. Neighbouring steps differ as much as far ones here, so many short turns tell more than
few long ones.

Forked ones have all pages of their parent, weights and KV cache too, but those they write to: activations,
and the KV blocks of their step. A name that is given is measured again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from engines import api
from engines.devices.loading import build, settle_garbage
from engines.overlap.device_plan import DevicePlan
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier, loop_sd
from experiments.validation.boots import WRAPPED, wrapper
from experiments.validation.twin_boots import INTERVAL, RESAMPLED, sd
from harness.common.machine import code
from harness.metrics import slices
from harness.metrics.definitions import NS_PER_MS

GROUPS = 10  # of processes that are up at once
PROCESSES, SECONDS = 8, 40
BATCH, BLOCKS, CONTEXT = 8, 4, 60  # of a decode step: requests, KV blocks of each, tokens of each
CORE = 1
WARM_UP = 50  # steps


def loaded() -> Any:
    """The default engine's OverlapModule, with a decode step's metadata in place."""
    torch.set_num_threads(1)
    plan = DevicePlan(api.EngineOptions(), api.find_engines()["overlap"].check({}))
    module: Any = build(plan.module(), torch.device("cpu"))
    name, size = f"decode.{BATCH}.{BLOCKS}", plan.options.block_size
    tables = torch.arange(1, BATCH * BLOCKS + 1).view(BATCH, BLOCKS)
    told = {
        "input_ids": torch.arange(BATCH) + 1000,
        "position_ids": torch.full((BATCH,), CONTEXT - 1),
        "context_lens": torch.full((BATCH,), CONTEXT),
        "slot_mapping": tables[:, -1] * size + (CONTEXT - 1) % size,
        "request_slots": torch.arange(BATCH),
        "block_tables": tables.view(-1),
    }
    for each in (*module.pages.keys, *module.pages.values):
        each[: BATCH * BLOCKS + 1].normal_(0, 0.1)  # what was never written has no pages
    for array in plan.layouts[name]:
        raw = module.buffers[name][array.offset : array.offset + array.nbytes]
        raw.view(getattr(torch, array.dtype)).copy_(told[array.name])
    return module


def decode(module: Any) -> None:
    module.programs["decode"](BATCH, BLOCKS)


def serve(line: Connection, module: Any) -> None:
    """Run two steps and answer the second's nanoseconds each time something comes, until it is None."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        module = module or loaded()
        os.sched_setaffinity(0, {CORE})
        for _ in range(WARM_UP):
            decode(module)
        settle_garbage()
        line.send(0)
        while line.recv() is not None:
            decode(module)
            began = time.perf_counter_ns()
            decode(module)
            line.send(time.perf_counter_ns() - began)


FORKED, HUGE, STILL = "forked", "huge pages", "no random addresses, one hash seed"
CELLS = (FORKED, HUGE, STILL)
HEADER = [
    "kind",
    "processes",
    "step, ms",
    "SD of the kind, that stays",
    "of those started as ever",
    "of all, that does not",
    "cycles",
    "wall",
    "SD of a loop",
    "commit",
]


@contextmanager
def begun(name: str) -> Iterator[None]:
    """Inside, processes start as `name` says."""
    variables = {HUGE: {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, STILL: {"PYTHONHASHSEED": "0"}}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, variables.get(name, {})):
        if name == STILL:
            command = WRAPPED["no random addresses"]
            multiprocessing.set_executable(wrapper(Path(folder), command, sys.executable))
        try:
            yield
        finally:
            multiprocessing.set_executable(sys.executable)


def start(how: str, module: Any) -> tuple[Connection, Any]:
    context: Any = multiprocessing.get_context(how)
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, module), daemon=True)
    process.start()
    theirs.close()
    return mine, process


def group(name: str, module: Any, seed: int) -> list[list[int]]:
    """The times of each process's turns, by cycle: those of the kind first."""
    order, half = Random(seed), PROCESSES // 2
    with begun(name):
        up = [start("fork" if name == FORKED else "spawn", module) for _ in range(half)]
        for line, _ in up:
            line.recv()
    up += [start("spawn", None) for _ in range(half)]
    for line, _ in up[half:]:
        line.recv()
    found: list[list[int]] = [[] for _ in up]
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        for each in order.sample(range(PROCESSES), PROCESSES):
            up[each][0].send(True)
            found[each].append(up[each][0].recv())
    for line, process in up:
        line.send(None)
        process.join()
    return found


def measured(name: str) -> dict[str, Any]:
    module = None
    if name == FORKED:
        module = loaded()
        with torch.inference_mode():
            for _ in range(WARM_UP):
                decode(module)
    loop, began = loop_sd(), time.monotonic()
    groups = [of_group(group(name, module, seed)) for seed in range(GROUPS)]
    seconds = time.monotonic() - began
    return {"kind": name, "seconds": seconds, "loop_sd": loop, "commit": code().commit[:7], "groups": groups}


def of_group(found: list[list[int]]) -> dict[str, Any]:
    """Trimmed means of the log of a process's turns by its cycle's mean, of either half of the cycles."""
    logs = np.log(np.array(found))
    apart = logs - logs.mean(axis=0)
    return {
        "cycles": logs.shape[1],
        "step_ms": float(np.exp(logs.mean())) / NS_PER_MS,
        "halves": [
            [round(slices.trimmed(each), 6) for each in half] for half in np.array_split(apart, 2, axis=1)
        ],
    }


def row(run: dict[str, Any]) -> list[str]:
    halves = np.array([each["halves"] for each in run["groups"]])  # [groups, 2, processes]
    of_kind, as_ever = np.split(halves, 2, axis=2)
    return [
        run["kind"],
        str(halves[:, 0].size),
        f"{np.mean([each['step_ms'] for each in run['groups']]):.2f}",
        *map(stays, (of_kind, as_ever)),
        f"{np.std(halves[:, 1] - halves[:, 0]) / 2:.2%}",
        str(min(each["cycles"] for each in run["groups"])),
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def stays(halves: npt.NDArray[np.float64]) -> str:
    """The SD, from one process to the next, of what a process is in both halves, with its interval by groups
    drawn again: the root of their covariance. What lasts for less than a half is not in it."""
    centred = halves - halves.mean(axis=2, keepdims=True)
    of_groups = (centred[:, 0] * centred[:, 1]).sum(axis=1) / (halves.shape[2] - 1)
    generator = np.random.default_rng(0)
    drawn = [generator.choice(of_groups, len(of_groups)).mean() for _ in range(RESAMPLED)]
    ends = ", ".join(sd(each) for each in np.percentile(drawn, INTERVAL))
    return f"{sd(of_groups.mean())} [{ends}]"


def main() -> None:
    runs = {run["kind"]: run for run in earlier(__file__)}
    for name in command_line.to_measure(__file__, __doc__, CELLS, runs):
        runs[name] = measured(name)
        found = [runs[each] for each in CELLS if each in runs]
        write_result(
            __file__,
            title="What a decode step differs by from one process to the next, on one core (SDs with 80% "
            "intervals)",
            header=HEADER,
            rows=[row(each) for each in found],
            data=found,
        )


if __name__ == "__main__":
    main()
