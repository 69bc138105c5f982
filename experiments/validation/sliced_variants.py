"""Every variant that is decided by turns, on this machine and on a device whose decode step takes 10 ms.

    python -m experiments.validation.sliced_variants [NAME ...]    all that are not there yet

Each is one `bench run --variant NAME` with its defaults, once as it is and once with `--pace 10ms`. Later
calls add to the runs of earlier ones; a name that is given is measured again.
"""

from __future__ import annotations

from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change, half_width, scatter
from overlap_bench.harness.metrics import definitions
from overlap_bench.harness.plan.variants import Variant, load_variants

DEVICES: dict[str, tuple[str, ...]] = {"paced, 10 ms": ("--pace", "10ms"), "unpaced": ()}
OF_ROUNDS, HOST = "round_step_ms", definitions.SLICED_SAME_DEVICE
SHOWN = (*definitions.OF_PAIRS, OF_ROUNDS, "tpot_ms_p50")
HEADER = [
    "variant",
    "device",
    "step, ms",
    "change",
    "half-width",
    "verdict",
    "exposed host time alone",
    "the step in rounds",
    "TPOT p50 in rounds",
    "pairs",
    "scatter of pairs, of boots",
    "outputs equal",
    "wall",
    "SD of a loop",
    "commit",
]


def decided_by_turns(variant: Variant) -> bool:
    """One of the built-in engine, without a metric of rounds."""
    return variant.engine == "overlap" and variant.primary in ("", *definitions.OF_PAIRS)


def measured(variant: str, device: str, *flags: str) -> dict[str, Any]:
    run = bench("run", "--variant", variant, *DEVICES[device], *flags)
    comparison = run["comparison"]
    said = [line for line in comparison["warnings"] if line.startswith(("undecided", "noise"))]
    return {
        "variant": variant,
        "device": device,
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "primary": comparison["primary"],
        "metrics": {name: comparison["metrics"][name] for name in SHOWN},
        "sliced": comparison["interleaved"],
        "outputs": comparison["outputs"],
        "said": said,
    }


def row(run: dict[str, Any]) -> list[str]:
    metrics = run["metrics"]
    turns = metrics[run["primary"]]
    return [
        run["variant"],
        run["device"],
        f"{turns['before']:.3f}",
        change(turns),
        f"±{half_width(turns):.2%}",
        turns["verdict"],
        # Runs of before 26 November 2026 did not keep it.
        change(metrics[HOST]) if HOST in metrics else "",
        change(metrics[OF_ROUNDS]),
        change(metrics["tpot_ms_p50"]),
        f"{run['sliced']['pairs']:,}",
        scatter(run["sliced"]),
        f"{run['outputs']['identical']} of {run['outputs']['compared']}",
        f"{run['seconds']:.0f} s",
        f"{run['loop_sd']:.1%}",
        run["commit"],
    ]


def main() -> None:
    names = [name for name, variant in load_variants().items() if decided_by_turns(variant)]
    asked = command_line.chosen(__file__, __doc__, names)
    runs = {(run["variant"], run["device"]): run for run in earlier(__file__)}
    for device in DEVICES:
        for name in names:
            if name in asked or (not asked and (name, device) not in runs):
                try:
                    runs[name, device] = measured(name, device)
                except SystemExit as error:  # one that can't run here, such as CUDA's own
                    print(error)
                    continue
                found = [runs[each, which] for which in DEVICES for each in names if (each, which) in runs]
                write_result(
                    __file__,
                    title="Every variant by turns, and the same step and TPOT p50 in rounds; 95% intervals",
                    header=HEADER,
                    rows=[row(each) for each in found],
                    data=found,
                )


if __name__ == "__main__":
    main()
