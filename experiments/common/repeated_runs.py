"""Runs of `bench` that an experiment repeats: one at a time, the results of earlier calls kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from experiments.common.record import FOLDER
from overlap_bench.harness.common import core_speed
from overlap_bench.harness.common.machine import code


def bench(*arguments: str, where: Path | None = None, out: Path | None = None) -> dict[str, Any]:
    """One measuring command: its exit code, its wall time, and its first comparison. `out`: where its records
    stay; without, they are thrown away."""
    loop = loop_sd()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "overlap_bench", *arguments, "--out", str(out or folder)]
        command += ["--format", "json"]
        began = perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=where)
        seconds = perf_counter() - began
    if not done.stdout:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}")
    result = json.loads(done.stdout)
    return {
        "code": done.returncode,
        "seconds": seconds,
        "commit": code().commit[:7],
        "loop_sd": loop,
        "gate": result.get("gate"),
        "comparison": result["comparisons"][0],
    }


def loop_sd() -> float:
    """How noisy the machine is just now: the SD of the log of one fixed loop of 0.1 ms, between calls, with
    every core busy for a second."""
    cores = core_speed.cores()
    command = [sys.executable, "-I", core_speed.__file__]
    running = [
        subprocess.Popen([*command, str(core), "1"], stdout=subprocess.PIPE, text=True) for core in cores
    ]
    loops = [np.log([float(each) for each in process.communicate()[0].split()]) for process in running]
    return float(np.sqrt(np.mean([each.var() for each in loops])))


def earlier(script: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """What earlier calls of a script found, in the order of its runs."""
    path = folder / f"{Path(script).stem}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["data"] if path.exists() else []
    return found


def kept(run: dict[str, Any]) -> dict[str, Any]:
    """What a run's row needs; the whole comparison of each would be megabytes."""
    comparison = run["comparison"]
    primary = comparison["metrics"][comparison["primary"]]
    return {
        **{name: run[name] for name in ("code", "seconds", "commit")},
        **{name: primary[name] for name in ("before", "change", "ci_low", "ci_high", "sd", "verdict")},
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
        "outputs": comparison["outputs"],
    }


def cells(run: dict[str, Any]) -> list[str]:
    """A kept run as cells: change, interval, SD of the pairs, verdict, seconds, commit."""
    return [
        f"{run['change']:+.2%}",
        f"[{run['ci_low']:+.2%}, {run['ci_high']:+.2%}]",
        f"{run['sd']:.2%}",
        run["verdict"],
        f"{run['seconds']:.0f} s",
        run["commit"],
    ]


CELLS = ["change", "interval", "pair SD", "verdict", "wall", "commit"]
