"""What the before arm's records predict of a toggle, beside what it gave.

    python -m experiments.validation.predictions [NAME ...]    such as overlap-8: variant and batch

Three variants at batch 1, 8 and 32 on the emulated device, each one `bench run` and a `bench explain` of it.
Closed loop at a concurrency of the batch, so that the batch is steady. Without names, those that are missing;
each is kept as soon as it is done, with the commit it was measured at. `ok`: the measured interval overlaps
the predicted one, whose half-width is at most one point or a quarter of the measured effect.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from overlap_bench.harness.common.machine import code

VARIANTS = ("overlap", "deferred-output", "async-output")
REQUESTS = {1: 8, 8: 32, 32: 64}  # of a round, by batch
NAMES = {f"{variant}-{batch}": (variant, batch) for variant in VARIANTS for batch in REQUESTS}
STEP, TPOT = "round_step_ms", "tpot_ms_p50"


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "overlap_bench", *arguments, "--format", "json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def measure(name: str) -> dict[str, Any]:
    """One comparison, and what is kept of it."""
    variant, batch = NAMES[name]
    asked = ["--arrival", "closed", "--concurrency", str(batch), "--num-requests", str(REQUESTS[batch])]
    with tempfile.TemporaryDirectory() as folder:
        result = bench("run", "--variant", variant, "--device", "emulated", *asked, "--out", folder)
        explained = bench("explain", str(Path(folder) / result["run"]))
    (comparison,) = result["comparisons"]
    metrics = comparison["metrics"]
    return {
        "commit": code().commit[:7],
        "prediction": comparison["prediction"],
        "step": {each: metrics[STEP][each] for each in ("before", "after", "change", "ci_low", "ci_high")},
        "tpot_change": metrics[TPOT]["change"],
        "parts": explained["step_us"],
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def judged(found: dict[str, Any]) -> str:
    """ "off" where the predicted interval does not meet the measured one, "wide" where that is no feat."""
    predicted, step = found["prediction"], found["step"]
    half = (predicted["ci_high"] - predicted["ci_low"]) / 2
    meet = predicted["ci_low"] <= step["ci_high"] and step["ci_low"] <= predicted["ci_high"]
    if not meet:
        return "off"
    return "ok" if half <= max(0.01, abs(step["change"]) / 4) else "wide"


def row(name: str, found: dict[str, Any]) -> list[str]:
    predicted, step, parts = found["prediction"], found["step"], found["parts"]
    unattributed = max(parts["unattributed"][f"share_{side}"] for side in ("before", "after"))
    return [
        name,
        f"{step['before']:.3f}",
        f"{predicted['change']:+.2%} [{predicted['ci_low']:+.2%}, {predicted['ci_high']:+.2%}]",
        f"{step['change']:+.2%} [{step['ci_low']:+.2%}, {step['ci_high']:+.2%}]",
        f"{100 * predicted['error']:+.2f}",
        judged(found),
        f"{found['tpot_change']:+.2%}",
        f"{unattributed:.1%}",
        found["commit"],
    ]


def main() -> None:
    path = FOLDER / "predictions.json"
    kept: dict[str, Any] = json.loads(path.read_text())["data"] if path.exists() else {}
    for name in command_line.chosen(__file__, __doc__, NAMES) or [name for name in NAMES if name not in kept]:
        kept[name] = measure(name)
        done = {each: kept[each] for each in NAMES if each in kept}
        errors = [abs(found["prediction"]["error"]) for found in done.values()]
        good = sum(judged(found) == "ok" for found in done.values())
        write_result(
            __file__,
            title=f"Change of the mean decode step, predicted and measured: {good} of {len(done)} ok "
            "(wide: they meet, by an interval too wide to count), mean absolute error "
            f"{100 * fmean(errors):.2f} points",
            header=[
                "variant and batch",
                "step before, ms",
                "predicted",
                "measured",
                "error, points",
                "",
                "TPOT p50",
                "unattributed, at most",
                "commit",
            ],
            rows=[row(each, found) for each, found in done.items()],
            data=done,
        )


if __name__ == "__main__":
    main()
