"""The variants on this machine's device, with defaults.

    python -m experiments.validation.variants [NAME ...]

Each is one `bench run`, whole and with its wall time (install aside). `recorder` is the built-in engine with
step records off against on. Run folders, less what nobody reads (keep.py), and the table go to
results/reference/; rows of variants that are not run this time stay, each with the commit it was measured at.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from experiments.common import command_line
from experiments.common.keep import keep
from experiments.common.record import FOLDER, write_result
from harness.common.machine import code
from harness.store import tables

RECORDER = [
    "--variant",
    "overlap",
    "--set",
    "schedule=overlap",
    "--before",
    "recorder=off",
    "--after",
    "recorder=on",
]
COMMANDS = {
    "pinned-h2d": ["--variant", "pinned-h2d"],
    "overlap": ["--variant", "overlap"],
    "async-output": ["--variant", "async-output"],
    "deferred-output": ["--variant", "deferred-output"],
    "copy-done": ["--variant", "copy-done"],
    "recorder": [*RECORDER, "--blocks", "24"],
}
# Of the blocks: all where the documents explain a run, requests where a notebook draws their latencies.
KEPT = {
    "overlap": tables.TABLES,
    "pinned-h2d": tables.NEEDED,
    "async-output": tables.NEEDED,
    "copy-done": tables.NEEDED,
}


def run(name: str, arguments: list[str]) -> list[str]:
    """One run; its row of the table. Its folder is kept under the name of the variant."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "harness",
            "run",
            *arguments,
            "--primary",
            "tpot_ms_p50",
            "--out",
            folder,
            "--format",
            "json",
        ]
        began = perf_counter()
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds = perf_counter() - began
        (made,) = Path(folder).iterdir()
        kept = FOLDER / "runs" / name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(made, kept)
        keep(kept, KEPT.get(name, ()))
    comparison = json.loads(out)["comparisons"][0]
    primary = comparison["metrics"][comparison["primary"]]
    outputs = comparison["outputs"]
    return [
        name,
        f"{primary['before']:.3f}",
        f"{primary['after']:.3f}",
        f"{primary['change']:+.2%}",
        f"[{primary['ci_low']:+.2%}, {primary['ci_high']:+.2%}]",
        primary["verdict"],
        f"{primary['sd']:.2%}",
        f"{outputs['identical']} of {outputs['compared']}",
        f"{seconds:.0f} s",
        code().commit[:7],
    ]


def main() -> None:
    names = command_line.chosen(__file__, __doc__, COMMANDS) or list(COMMANDS)
    earlier = FOLDER / "variants.json"
    rows = {row[0]: row for row in json.loads(earlier.read_text())["rows"]} if earlier.exists() else {}
    for name in names:
        rows[name] = run(name, COMMANDS[name])
        print(rows[name], file=sys.stderr)
    write_result(
        __file__,
        title="Variants with defaults: TPOT p50 in ms, 95% interval over blocks",
        header=[
            "variant",
            "before",
            "after",
            "change",
            "interval",
            "verdict",
            "pair SD",
            "outputs equal",
            "wall",
            "commit",
        ],
        rows=[rows[name] for name in COMMANDS if name in rows],
        data=COMMANDS,
    )


if __name__ == "__main__":
    main()
