"""What a before arm can't show of its device, its client and a process border.

For harness/analysis/prediction.py.

    python -m experiments.validation.calibration [NAME ...]    such as overlap-16: variant and batch

Runs of their own, closed loop on the emulated device, at other batches than those that were predicted for
results/reference/proofs/several.md. Each is kept as soon as it is done; without names, those that are
missing.

- from `overlap`: `turnaround`, device idle between two queued steps, and `rested`, how much longer a program
  takes on a device that stood still before it (the before arm's) than on one that did not;
- from `async-output` with two tokens to a chunk, so that every second step of the before arm sends:
  `hand_over`, what giving a step's tokens to the output process exposes, and `aftermath`, of one message.

Besides the table, this writes harness/analysis/calibration.json, which is what predictions use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from overlap_bench.harness import analysis
from overlap_bench.harness.analysis import explain, prediction, stored
from overlap_bench.harness.analysis.prediction import Calibration, Measured
from overlap_bench.harness.common.machine import code, fingerprint
from overlap_bench.harness.metrics import attribution

OPTIONS: dict[str, tuple[str, ...]] = {"overlap": (), "async-output": ("--stream-interval", "2")}
REQUESTS = {2: 16, 16: 32, 48: 96}  # of a round, by batch
NAMES = {f"{variant}-{batch}": (variant, batch) for variant in OPTIONS for batch in REQUESTS}


def measure(name: str) -> dict[str, Any]:
    """One run: its commit, and by quantity one value per block, us."""
    variant, batch = NAMES[name]
    asked = ["--arrival", "closed", "--concurrency", str(batch), "--num-requests", str(REQUESTS[batch])]
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "-m", "overlap_bench", "run", "--variant", variant, "--device", "emulated"]
        command += [*asked, *OPTIONS[variant], "--out", results, "--format", "json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        folder = Path(results) / json.loads(done.stdout)["run"]
        manifest = stored.readable(folder)
        blocks, _ = stored.finished(folder, manifest)
        before, after = manifest.design.arms
        values: dict[str, list[float]] = {}
        for block in blocks:
            boots = [explain.of_boot(block, arm, folder) for arm in (before, after)]
            first, second = attribution.matched_means(boots)
            if variant == "overlap":
                found = {
                    "turnaround": second["turnaround"],
                    "rested": first["device"] - second["device"],
                }
            else:
                known = prediction.before_of(block, before)
                assert known is not None
                sent = (known.chunks > 0).mean()
                found = {
                    "hand_over": second["output"],
                    "aftermath": known.aftermath(None).mean / sent,
                }
            for quantity, value in found.items():
                values.setdefault(quantity, []).append(float(value))
    return {"commit": code().commit[:7], "values": values}


def measured(values: Sequence[float]) -> Measured:
    """Mean over blocks and its standard error."""
    return Measured(round(fmean(values), 2), round(stdev(values) / len(values) ** 0.5, 2))


def main() -> None:
    path = FOLDER / "calibration.json"
    kept: dict[str, Any] = json.loads(path.read_text())["data"] if path.exists() else {}
    for name in command_line.chosen(__file__, __doc__, NAMES) or [name for name in NAMES if name not in kept]:
        kept[name] = measure(name)
        done = {each: kept[each] for each in NAMES if each in kept}
        write_result(
            __file__,
            title="What a before arm can't show, us: mean over blocks and its standard error",
            header=["variant and batch", "", "", "commit"],
            rows=[
                [
                    each,
                    *(f"{quantity} {measured(values)}" for quantity, values in found["values"].items()),
                    found["commit"],
                ]
                for each, found in done.items()
            ],
            data=done,
        )
    if len(kept) == len(NAMES):
        keep(kept)


def keep(found: dict[str, Any]) -> None:
    """What predictions use, from all runs."""
    columns = {
        quantity: [measured(found[f"{variant}-{batch}"]["values"][quantity]) for batch in REQUESTS]
        for variant, quantity in (
            ("overlap", "turnaround"),
            ("overlap", "rested"),
            ("async-output", "hand_over"),
            ("async-output", "aftermath"),
        )
    }
    calibration = Calibration(
        source="experiments/validation/calibration.py",
        device="emulated",
        machine=fingerprint(),
        batches=list(REQUESTS),
        **{f"{quantity}_us": values for quantity, values in columns.items()},
    )
    path = Path(analysis.__file__).with_name("calibration.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")


if __name__ == "__main__":
    main()
