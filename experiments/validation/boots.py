"""What boots differ by: equal arms in turns, as they are and with one thing after the other held still.

    python -m experiments.validation.boots [NAME ...]    all that are not there yet

Each is one `bench aa`. How much the change of a block scatters for its boots is what its pairs do not
explain. For vLLM, which comes last, BENCH_VLLM names an interpreter that has it (engines/vllm/README.md). A
name that is given is measured again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from scipy.stats import chi2

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change
from overlap_bench.harness.metrics import definitions
from tests.support.vllm_builds import interpreter

BLOCKS, OF_VLLM = 16, 8  # vLLM's take half a minute each
CONFIDENCE = 0.8
SERIAL = ("--variant", "pinned-h2d")
OVERLAPPED = ("--variant", "overlap", "--set", "schedule=overlap")
VLLM = ("--engine", "vllm", "--set", "multiprocessing=off")
HUGE = ("--set", "env.GLIBC_TUNABLES=glibc.malloc.hugetlb=1")
WRAPPED = {  # starts an interpreter that is otherwise the same: {python} is this one
    "no random addresses": "setarch -R {python}",
    "on one core": "taskset -c 1 {python}",
}
CELLS: dict[str, tuple[str, ...]] = {
    "serial": SERIAL,
    "serial, one hash seed": (*SERIAL, "--set", "env.PYTHONHASHSEED=0"),
    "serial, no random addresses": SERIAL,
    "serial, huge pages": (*SERIAL, *HUGE),
    "serial, on one core": SERIAL,
    "overlapped": OVERLAPPED,
    "overlapped, no random addresses": OVERLAPPED,
    "overlapped, huge pages": (*OVERLAPPED, *HUGE),
    "vLLM": VLLM,
    "vLLM, huge pages": (*VLLM, *HUGE),
    "vLLM, no random addresses": VLLM,
}
HEADER = [
    "loop",
    "blocks",
    "change",
    "SD of a block",
    "of its pairs",
    "of its boots",
    "wall",
    "SD of a loop",
    "commit",
]


def wrapper(folder: Path, command: str, python: str) -> str:
    """An interpreter that starts another one by `command`."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {command.format(python=python)} "$@"\n')
    os.chmod(path, 0o755)
    return str(path)


def measured(name: str) -> dict[str, Any]:
    of_vllm = name.startswith("vLLM")
    blocks = OF_VLLM if of_vllm else BLOCKS
    flags = [*CELLS[name], "--trials", str(blocks), "--rounds", "1", "--seed", str(list(CELLS).index(name))]
    python = interpreter() if of_vllm else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        for what, command in WRAPPED.items():
            if name.endswith(what):
                python = wrapper(Path(folder), command, python)
        run = bench("aa", *flags, "--set", f"python={python}")
    return {
        "loop": name,
        "blocks": blocks,
        **{each: run[each] for each in ("code", "seconds", "commit", "loop_sd")},
        "turns": run["comparison"]["metrics"][definitions.SLICED],
        "sliced": run["comparison"]["interleaved"],
    }


def between(run: dict[str, Any]) -> str:
    """What boots add, from the ends of the interval of the SD of a block."""
    sd, within, free = run["turns"]["sd"], run["sliced"]["within"], run["blocks"] - 1
    tail = (1 - CONFIDENCE) / 2
    ends = (sd * (free / chi2.ppf(each, free)) ** 0.5 for each in (1 - tail, tail))
    low, high = (max(0.0, each**2 - within**2) ** 0.5 for each in ends)
    return f"{run['sliced']['between']:.2%} [{low:.2%}, {high:.2%}]"


def main() -> None:
    runs = {run["loop"]: run for run in earlier(__file__)}
    for name in command_line.to_measure(__file__, __doc__, CELLS, runs):
        runs[name] = measured(name)
        found = [runs[each] for each in CELLS if each in runs]
        write_result(
            __file__,
            title="Equal arms in turns: what a block's change scatters by (boots with their "
            f"{CONFIDENCE:.0%} interval)",
            header=HEADER,
            rows=[
                [
                    run["loop"],
                    str(run["blocks"]),
                    change(run["turns"]),
                    f"{run['turns']['sd']:.2%}",
                    f"{run['sliced']['within']:.2%}",
                    between(run),
                    f"{run['seconds']:.0f} s",
                    f"{run['loop_sd']:.1%}",
                    run["commit"],
                ]
                for run in found
            ],
            data=found,
        )


if __name__ == "__main__":
    main()
