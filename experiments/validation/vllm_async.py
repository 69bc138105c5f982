"""What vLLM's async scheduling gives at a GPU's pace, by batch and by how slow the host is beside the device.

    python -m experiments.validation.vllm_async PYTHON [CELLS]     vLLM's interpreter; all cells by default

Each cell is `bench run --variant vllm-async-scheduling` of four blocks, about two minutes: vLLM's core in a
process of its own, as in its server, and the arms in turns. Called again, it goes on with the next cell. At
`k` the device's times are stretched by this host's slowness; at `k/2` and `2k` a host is assumed that is half
and twice as slow. vLLM expects 5 to 10%.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from experiments.common.command_line import parser
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from overlap_bench.harness.metrics import definitions

PROFILE = "llama3-8b-h100"
CELLS = tuple(product((1, 16, 64, 256), ("k/2", "k", "2k")))
EXPECTED = (-0.10, -0.05)
HEADER = [
    "batch",
    "device stretched by",
    "step off, ms",
    "on, ms",
    "on against off, in turns",
    "does its interval reach −5 to −10%",
    "outputs equal",
    "blocks",
    "wall",
]


def measured(python: str, batch: int, stretch: str) -> dict[str, Any]:
    run = bench(
        *("run", "--variant", "vllm-async-scheduling", "--pace", f"{PROFILE}*{stretch}"),
        *("--set", f"python={python}", "--concurrency", f"{batch}", "--num-requests", f"{batch}"),
        *("--max-batch-size", f"{max(batch, 8)}", "--max-new-tokens", "64"),
        *("--trials", "4", "--interleaved-rounds", "4", "--rounds", "1"),
    )
    comparison = run["comparison"]
    return {
        **{name: run[name] for name in ("code", "seconds", "commit")},
        "batch": batch,
        "stretch": stretch,
        "blocks": comparison["trials"],
        "step": comparison["metrics"][definitions.SLICED],
        "outputs": comparison["outputs"],
    }


def cells(run: dict[str, Any]) -> list[str]:
    step, outputs = run["step"], run["outputs"]
    reached = step["ci_low"] <= EXPECTED[1] and step["ci_high"] >= EXPECTED[0]
    return [
        f"{run['batch']}",
        run["stretch"],
        f"{step['before']:.2f}",
        f"{step['after']:.2f}",
        f"{step['change']:+.1%} [{step['ci_low']:+.1%}, {step['ci_high']:+.1%}]",
        "yes" if reached else "no",
        f"{outputs['identical']} of {outputs['compared']}",
        f"{run['blocks']}",
        f"{run['seconds']:.0f} s",
    ]


def main() -> None:
    asked = parser(__file__, __doc__)
    asked.add_argument("python", metavar="PYTHON", help="vLLM's interpreter")
    asked.add_argument("cells", metavar="CELLS", nargs="?", type=int, default=len(CELLS), help="default: all")
    given = asked.parse_args()
    runs = earlier(__file__)
    for batch, stretch in CELLS[len(runs) : len(runs) + given.cells]:
        runs.append(measured(given.python, batch, stretch))
        write_result(
            __file__,
            title="vLLM's async scheduling at an H100's pace, Llama 3 8B",
            header=HEADER,
            rows=list(map(cells, runs)),
            data=runs,
        )


if __name__ == "__main__":
    main()
