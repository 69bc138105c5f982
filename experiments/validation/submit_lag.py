"""How late the load generator sends, with a real engine on the same cores.

    python -m experiments.validation.submit_lag

The seed's workload (64 requests, one per 20 ms; its own run lagged 18 ms at p50 and 57 ms at p99) and 1,000
requests a second (1,000 requests), each over six boots of the engine, requests pooled.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.common import command_line
from experiments.common.record import write_result

LOADS = {
    "one per 20 ms (the seed's)": ["--num-requests", "64", "--interval-ms", "20", "--max-new-tokens", "64"],
    "1,000 a second": ["--num-requests", "1000", "--interval-ms", "1", "--max-new-tokens", "4"],
}
ENGINES = {
    "serial": ["--before", "schedule=serial", "--before", "h2d=pinned", "--before", "graph=on"],
    "overlap": [
        "--before",
        "schedule=overlap",
        "--before",
        "launch=inline",
        "--before",
        "h2d=pinned",
        "--before",
        "graph=on",
    ],
}
BOOTS = 6


def lags_ms(load: list[str], engine: list[str]) -> np.ndarray:
    """Lag of every measured request, ms."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", "run", "--engine", "overlap", *engine, *load]
        command += ["--blocks", str(BOOTS), "--rounds", "1", "--out", folder, "--format", "json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        requests = pd.concat(map(pd.read_parquet, sorted(Path(folder).glob("*/blocks/*/requests.parquet"))))
    lags: np.ndarray = np.maximum(0, (requests["sent_ns"] - requests["scheduled_ns"]).to_numpy()) / 1e6
    return lags


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    rows, data = [], {}
    for load, flags in LOADS.items():
        for engine, settings in ENGINES.items():
            lags = lags_ms(flags, settings)
            p50, p99 = np.percentile(lags, [50, 99])
            rows.append([load, engine, str(len(lags)), f"{p50:.3f}", f"{p99:.3f}", f"{lags.max():.2f}"])
            data[f"{load}, {engine}"] = [round(float(lag), 4) for lag in lags]
            print(rows[-1], file=sys.stderr)
    write_result(
        __file__,
        title=f"Submit lag in ms, {BOOTS} boots pooled",
        header=["load", "engine", "requests", "p50", "p99", "max"],
        rows=rows,
        data=data,
    )


if __name__ == "__main__":
    main()
