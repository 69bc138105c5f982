"""Whether a change differs from block to block for its boots, or for what the machine does just then.

    python -m experiments.validation.twin_boots [NAME ...]    all that are not there yet, 5 minutes each

Two boots of each arm at once, and one baton for the four of them: in each cycle both pairs of a before and
an after have their turns within the same 0.1 s. What a block's change owes to its moment, both have; what it
owes to the boots, each pair has alone. A name that is given is measured once more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from engines import api
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier, loop_sd
from experiments.validation.boots import WRAPPED, wrapper
from harness.cli.progress import on_stderr
from harness.common.machine import code, guess_device
from harness.metrics import slices
from harness.plan.request import Request
from harness.plan.settings import make_design
from harness.plan.variants import load_variants
from harness.store.tables import finished_blocks, read_table
from harness.studies import measure

BLOCKS = 16
SEGMENTS = 8  # four arms make a segment twice as long
ARMS = ("before", "after")
TWIN = "_twin"
OF_TWINS = [f"{arm} {part}" for arm in ARMS for part in ("device", "host")]
RESAMPLED = 2_000
INTERVAL = (10, 90)  # percentiles
# Imported by each interpreter as it starts: the device has core 1 for itself, all else core 0.
A_CORE_EACH = """
import os, sys
os.sched_setaffinity(0, {int("engines.devices.emulated.process" in sys.orig_argv)})
"""
HELD = {  # what is held still, as settings of both arms: {folder} has an interpreter and a start-up file
    "no random addresses": "python={folder}/python",
    "one hash seed": "env.PYTHONHASHSEED=0",
    "huge pages": "env.GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
    "a core each": "env.PYTHONPATH={folder}",
}
CELLS = [
    "overlap",
    "async-output",
    "overlap, huge pages",
    "overlap, no random addresses",
    "overlap, one hash seed",
    "overlap, a core each",
    "overlap, no random addresses, one hash seed",
]
HEADER = [
    "variant",
    "change",
    "SD of a block",
    "its pairs",
    "the moment",
    "the boots",
    "boots of before: device, host",
    "boots of after: device, host",
    "blocks",
    "pairs",
    "wall",
    "SD of a loop",
    "commit",
]


def measured(name: str) -> dict[str, Any]:
    variant, *held = name.split(", ")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wrapper(folder, WRAPPED["no random addresses"], sys.executable)
        (folder / "sitecustomize.py").write_text(A_CORE_EACH)
        request = Request(
            variant=variant,
            both=tuple(HELD[each].format(folder=folder) for each in held),
            design={
                "blocks": BLOCKS,
                "rounds": 1,
                "segments": SEGMENTS,
                "seed": CELLS.index(name),
            },
        )
        design = make_design(request, api.find_engines(), load_variants(), guess_device)
        twins = (msgspec.structs.replace(arm, name=arm.name + TWIN) for arm in design.arms)
        design = msgspec.structs.replace(design, arms=(*design.arms, *twins), against_itself=True)
        loop, began = loop_sd(), time.monotonic()
        run = measure.measure(design, folder, on_stderr).folder
        seconds = time.monotonic() - began
        blocks = [of_block(read_table(run, number, "slices")) for number in finished_blocks(run)]
    return {
        "variant": name,
        "seconds": seconds,
        "commit": code().commit[:7],
        "loop_sd": loop,
        "blocks": blocks,
    }


def of_block(turns: pd.DataFrame) -> dict[str, Any]:
    """The cycles that all four arms have a decode turn of, and trimmed means over them, with their errors: of
    the log of the change of `one` pair and of `two`, its twin, and of what they are `apart`; and of what the
    twins of each arm differ by, as shares of its step: on the device, and in exposed host time."""
    arms = (*ARMS, *(arm + TWIN for arm in ARMS))
    of_arm = {arm: slices.decode_slices(turns[turns["arm"] == arm]).set_index(slices.SAME) for arm in arms}
    step, device = (
        pd.DataFrame({arm: each[name] for arm, each in of_arm.items()}).dropna()
        for name in ("interval_ns", "device_ns")
    )
    logs = np.log(step)
    found = {
        "one": logs["after"] - logs["before"],
        "two": logs["after" + TWIN] - logs["before" + TWIN],
    }
    found["apart"] = found["one"] - found["two"]
    for arm in ARMS:
        computes = (device[arm + TWIN] - device[arm]) / step[arm]
        found[f"{arm} device"] = computes
        found[f"{arm} host"] = (step[arm + TWIN] - step[arm]) / step[arm] - computes
    return {
        "cycles": len(logs),
        **{name: slices.trimmed(values) for name, values in found.items()},
        "errors": {name: slices.error_of_trimmed(values) for name, values in found.items()},
    }


def components(frame: pd.DataFrame) -> dict[str, float]:
    """Variances of a block's change: as it is; what its pairs explain; what both twins share beyond that, and
    what each has alone; and what each arm's own boots add, on the device and in exposed host time (the
    first runs did not tell). `frame`: one row per block."""
    of_pairs = {name: float((frame[f"error {name}"] ** 2).mean()) for name in ("one", "two", "apart")}
    both = (of_pairs["one"] + of_pairs["two"]) / 2
    shared = both - of_pairs["apart"] / 2  # of the pairs' scatter, that cycles have in common
    return {
        "block": float((frame["one"].var() + frame["two"].var()) / 2),
        "pairs": both,
        "moment": float(frame["one"].cov(frame["two"])) - shared,
        "boots": float((frame["one"] - frame["two"]).var() - of_pairs["apart"]) / 2,
        **{
            part: float(frame[part].var() - (frame[f"error {part}"] ** 2).mean()) / 2
            for part in OF_TWINS
            if part in frame
        },
    }


def table(run: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {name: each[name] for name in ("one", "two", *OF_TWINS) if name in each}
            | {f"error {name}": value for name, value in each["errors"].items()}
            for each in run["blocks"]
        ]
    )


def intervals(frame: pd.DataFrame) -> dict[str, npt.NDArray[np.float64]]:
    """80% intervals of the components, by blocks drawn again."""
    generator = np.random.default_rng(0)
    drawn = [
        components(frame.iloc[generator.integers(len(frame), size=len(frame))]) for _ in range(RESAMPLED)
    ]
    return {name: np.percentile([each[name] for each in drawn], INTERVAL) for name in drawn[0]}


def sd(variance: float) -> str:
    return f"{max(0.0, variance) ** 0.5:.2%}"


def row(run: dict[str, Any]) -> list[str]:
    frame = table(run)
    found, ends = components(frame), intervals(frame)

    def cell(name: str) -> str:
        return f"{sd(found[name])} [{', '.join(map(sd, ends[name]))}]"

    return [
        run["variant"],
        f"{np.expm1(frame[['one', 'two']].to_numpy().mean()):+.2%}",
        cell("block"),
        sd(found["pairs"]),
        *map(cell, ("moment", "boots")),
        *(", ".join(sd(found[each]) for each in OF_TWINS if each in found and arm in each) for arm in ARMS),
        str(len(frame)),
        f"{2 * sum(each['cycles'] for each in run['blocks']):,}",
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def main() -> None:
    found = earlier(__file__)
    for name in command_line.to_measure(__file__, __doc__, CELLS, [run["variant"] for run in found]):
        found = sorted([*found, measured(name)], key=lambda run: CELLS.index(run["variant"]))
        write_result(
            __file__,
            title="What a block's change scatters by: its pairs, its moment, its boots (SDs with 80% "
            "intervals)",
            header=HEADER,
            rows=[row(each) for each in found],
            data=found,
        )


if __name__ == "__main__":
    main()
