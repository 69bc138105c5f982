"""Where an experiment's result goes: results/reference/<name>.json with everything, <name>.md to read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from experiments.common.command_line import ROOT, command
from overlap_bench.harness.common.machine import code, fingerprint

FOLDER = ROOT / "results" / "reference"
Rows = list[list[str]]


def write_result(
    script: str,
    *,
    title: str,
    header: list[str],
    rows: Rows,
    data: Any,
    sections: Mapping[str, Rows] | None = None,
    folder: Path = FOLDER,
) -> None:
    """Write both files of a script, named after it, and print the tables. `script` is its `__file__`;
    `sections`: further tables of the page by their titles, each with its header first."""
    name, machine, revision = Path(script).stem, fingerprint(), code(besides=("experiments",))
    when = time.strftime("%Y-%m-%d")
    lines = [
        f"# {title}",
        "",
        *_table(header, rows),
        *(line for each in (sections or {}).items() for line in _section(*each)),
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
    (folder / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print("\n".join(lines))


def _section(title: str, table: Rows) -> list[str]:
    header, *rows = table
    return [f"## {title}", "", *_table(header, rows)]


def _table(header: list[str], rows: Rows) -> list[str]:
    """Its lines, an empty last one included."""
    ruler = "|" + "---|" * len(header)
    return ["| " + " | ".join(header) + " |", ruler, *("| " + " | ".join(row) + " |" for row in rows), ""]
