"""How far what our client reads is from what a server of known timing does.

    python -m experiments.validation.client_accuracy

Against `harness.serve.mock` (TTFT 50 ms, ITL 10 ms) on the same cores: a closed loop of 1, 100, 500 and
1,000 requests through all of `bench run --engine openai`, REPEATS times each, in an order drawn each time.
An error is what was read, less what was asked of the server. How late the server itself sent, by its own word
(GET /lateness: from when a token was due to just before its send, in the round and in the one that warms up),
is counted separately: what is left of the TTFT's error without it is the client's and the kernel's. A TTFT
begins at the send; in a closed loop whose requests all begin at once many are sent late, which is the submit
lag, and is in the TTFT from when a request was due. A late reading lengthens one gap and shortens the next by
as much, so the gaps' median hides what their p99 shows. vLLM's Python client read a TTFT 3.8 / 23.4 / 137 /
294 ms too high, on another machine.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import pandas as pd

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.server import serving

TTFT_MS, ITL_MS = 50.0, 10.0
TOKENS = 32
REQUESTS = {1: 24, 100: 400, 500: 1000, 1000: 2000}  # by concurrency
GOALS = {1: "1", 100: "3", 500: "10", 1000: "28"}  # ms, of the TTFT
VLLM = {1: "3.8", 100: "23.4", 500: "137", 1000: "294"}
REPEATS = 5


def measure(url: str, concurrency: int) -> dict[str, float]:
    """One round, after a warm-up: ms, but for counts and shares."""
    with tempfile.TemporaryDirectory() as results:
        load = ["--arrival", "closed", "--concurrency", str(concurrency)]
        load += ["--num-requests", str(REQUESTS[concurrency]), "--max-new-tokens", str(TOKENS)]
        command = [sys.executable, "-m", "harness", "run", "--engine", "openai", "--before", f"url={url}"]
        command += [*load, "--rounds", "1", "--out", results, "--format", "json"]
        with urlopen(Request(f"{url}/lateness", method="DELETE")):
            pass
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with urlopen(f"{url}/lateness") as reply:
            late: dict[str, Any] = json.load(reply)
        result = json.loads(done.stdout)
        (rounds,) = map(pd.read_parquet, Path(results).glob("*/blocks/000/rounds.parquet"))
    comparison = result["comparisons"][0]
    read = {name: row["before"] for name, row in comparison["metrics"].items()}
    counted = {name: row["before"] for name, row in comparison["mechanism"].items()}
    seconds = float(rounds["ended_ns"][0] - rounds["started_ns"][0]) / 1e9
    return {
        "ttft_error_ms": read["ttft_ms_p50"] - TTFT_MS,
        "itl_error_ms": read["itl_chunk_ms_p50"] - ITL_MS,
        "itl_p99_error_ms": read["itl_chunk_ms_p99"] - ITL_MS,
        "ttft_scheduled_error_ms": read["ttft_scheduled_ms_p50"] - TTFT_MS,
        "server_ttft_late_ms": late["first_token"]["p50"] / 1e3,
        "server_itl_late_ms": late["later_tokens"]["p50"] / 1e3,
        "server_itl_late_p99_ms": late["later_tokens"]["p99"] / 1e3,
        "client_lag_p50_ms": read["client_lag_ms_p50"],
        "client_lag_p99_ms": read["client_lag_ms_p99"],
        "submit_lag_p99_ms": read["submit_lag_ms_p99"],
        "read_together_share": counted.get("chunks_read_together", 0) / counted["chunks"],
        "client_cores": float(rounds["cpu_ms.engine"][0]) / 1e3 / seconds,
        "load_generator_cores": float(rounds["cpu_ms.load_generator"][0]) / 1e3 / seconds,
        "chunks_per_s": counted["chunks"] / seconds,
        "failed": float(comparison["failures"]["before"]["failed"]),
    }


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    found: dict[int, list[dict[str, float]]] = {concurrency: [] for concurrency in REQUESTS}
    draw = random.Random(0)
    with serving("harness.serve.mock", "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)) as url:
        for _ in range(REPEATS):
            for concurrency in draw.sample(list(REQUESTS), len(REQUESTS)):
                found[concurrency].append(measure(url, concurrency))
                print(concurrency, found[concurrency][-1], file=sys.stderr)
    rows = []
    for concurrency, repeats in found.items():
        middle = {name: median(each[name] for each in repeats) for name in repeats[0]}
        rows.append(
            [
                f"{concurrency:,}",
                f"{middle['ttft_error_ms']:.2f}",
                GOALS[concurrency],
                VLLM[concurrency],
                f"{middle['server_ttft_late_ms']:.2f}",
                f"{median(each['ttft_error_ms'] - each['server_ttft_late_ms'] for each in repeats):.2f}",
                f"{middle['ttft_scheduled_error_ms']:.1f}",
                f"{middle['itl_error_ms']:.3f} / {middle['itl_p99_error_ms']:.2f}",
                f"{middle['server_itl_late_ms']:.2f} / {middle['server_itl_late_p99_ms']:.2f}",
                f"{middle['client_lag_p50_ms']:.2f} / {middle['client_lag_p99_ms']:.2f}",
                f"{middle['read_together_share']:.1%}",
                f"{middle['chunks_per_s']:,.0f}",
                f"{middle['client_cores']:.2f} + {middle['load_generator_cores']:.2f}",
            ]
        )
    write_result(
        __file__,
        title=f"Error of our client beside a mock server, ms; medians of {REPEATS} rounds",
        header=[
            "concurrency",
            "TTFT p50",
            "goal",
            "vLLM's client",
            "server's lateness",
            "without it",
            "TTFT p50 from when it was due",
            "ITL p50 / p99",
            "server's lateness p50 / p99",
            "client lag p50 / p99",
            "chunks read together",
            "chunks/s",
            "cores: client + load generator",
        ],
        rows=rows,
        data={str(concurrency): repeats for concurrency, repeats in found.items()},
    )


if __name__ == "__main__":
    main()
