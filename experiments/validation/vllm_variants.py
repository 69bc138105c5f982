"""vLLM's own switches on a CPU: each named variant of it once, with what shows that it was in force.

    python -m experiments.validation.vllm_variants [NAME ...]    all that are not there yet

BENCH_VLLM names an interpreter that has vLLM (engines/vllm/README.md). Each is one `bench run --variant NAME
--max-minutes 6`, for boots are a minute and more. In force: the engine asks vLLM's configuration once it has
booted, and refuses a switch that vLLM has flipped; beside that the table says what the records of both arms
differ by. A name that is given is measured again.
"""

from __future__ import annotations

from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.common.vllm_builds import interpreter
from harness.metrics import definitions
from harness.plan.variants import load_variants

FLAGS = ("--max-minutes", "6")
OF_REQUESTS, HOST = "tpot_ms_p50", definitions.SLICED_SAME_DEVICE
DIFFERS = 0.02  # between the arms, of what is worth telling
HEADER = [
    "variant",
    "its claim",
    "metric",
    "before",
    "change",
    "verdict",
    "exposed host time alone",
    "TPOT p50 of requests",
    "what the arms differ by",
    "device busy",
    "outputs equal",
    "blocks",
    "wall",
    "commit",
]


def measured(name: str, python: str) -> dict[str, Any]:
    run = bench("run", "--variant", name, "--set", f"python={python}", *FLAGS)
    comparison = run["comparison"]
    primary = comparison["primary"]
    return {
        "variant": name,
        **{each: run[each] for each in ("code", "seconds", "commit", "loop_sd")},
        **{
            each: comparison[each]
            for each in ("primary", "mechanism", "limit", "outputs", "blocks", "sliced")
        },
        "metrics": {
            each: comparison["metrics"][each]
            for each in dict.fromkeys((primary, HOST, OF_REQUESTS))
            if each in comparison["metrics"]
        },
        "said": [line for line in comparison["warnings"] if line.startswith("undecided")],
    }


def change(metric: dict[str, Any]) -> str:
    return f"{metric['change']:+.1%} [{metric['ci_low']:+.1%}, {metric['ci_high']:+.1%}]"


def differing(run: dict[str, Any]) -> str:
    """The numbers of the mechanism that differ most."""
    found = {
        name: (each["before"], each["after"], each["unit"])
        for name, each in run["mechanism"].items()
        if abs(each["after"] - each["before"]) > DIFFERS * max(abs(each["before"]), abs(each["after"]))
    }
    return "; ".join(
        f"{name} {before:.4g} → {after:.4g} {unit}" for name, (before, after, unit) in list(found.items())[:4]
    )


def row(run: dict[str, Any], claim: str) -> list[str]:
    metric, busy = run["metrics"][run["primary"]], run["limit"].get("device_busy")
    return [
        run["variant"],
        claim,
        run["primary"],
        f"{metric['before']:.2f}",
        change(metric),
        metric["verdict"],
        change(run["metrics"][HOST]) if HOST in run["metrics"] else "",
        change(run["metrics"][OF_REQUESTS]),
        differing(run),
        "" if busy is None else f"{busy['before']:.0%} → {busy['after']:.0%}",
        f"{run['outputs']['identical']} of {run['outputs']['compared']}",
        str(run["blocks"]),
        f"{run['seconds']:.0f} s",
        run["commit"],
    ]


def main() -> None:
    variants = {name: each for name, each in load_variants().items() if each.engine == "vllm"}
    runs = {run["variant"]: run for run in earlier(__file__)}
    names = command_line.to_measure(__file__, __doc__, variants, runs)
    python = interpreter()
    for name in names:
        try:
            runs[name] = measured(name, python)
        except SystemExit as error:  # one that can't run here; why stands on the screen
            print(error)
            continue
        found = [runs[each] for each in variants if each in runs]
        write_result(
            __file__,
            title="vLLM's switches on a CPU, each by `bench run --variant`; 95% intervals",
            header=HEADER,
            rows=[row(each, variants[each["variant"]].claim) for each in found],
            data=found,
        )


if __name__ == "__main__":
    main()
