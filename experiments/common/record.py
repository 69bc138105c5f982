"""Where an experiment's result goes: results/reference/<name>.json with everything, <name>.md to read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from experiments.common.command_line import ROOT, command
from harness.common.machine import code, fingerprint

FOLDER = ROOT / "results" / "reference"


def write_result(
    script: str, *, title: str, header: list[str], rows: list[list[str]], data: Any, folder: Path = FOLDER
) -> None:
    """Write both files of a script, named after it, and print the table. `script` is its `__file__`."""
    name, machine, revision = Path(script).stem, fingerprint(), code(besides=("experiments",))
    when = time.strftime("%Y-%m-%d")
    lines = [
        f"# {title}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"{when}, `{command(script)}`, commit {revision.commit[:10]}"
        + (" with changes" if revision.dirty else "")
        + f"; {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, "
        + (", ".join(machine.gpus) or "no GPU")
        + f", Linux {machine.kernel}.",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    content = {
        "title": title,
        "date": when,
        "machine": msgspec.to_builtins(machine),
        "code": msgspec.to_builtins(revision),
        "header": header,
        "rows": rows,
        "data": data,
    }
    (folder / f"{name}.json").write_text(json.dumps(content) + "\n")
    print("\n".join(lines))
