"""What an unfinished run found so far: `python -m experiments.unfinished FOLDER [FOLDER ...]`, in markdown.

A machine that was lent is taken away again, and nothing can be gone on with there. FOLDER is of any run
(`bench run`, `aa`, `factorial`), or of an experiment, whose workloads are then shown one by one. The finished
blocks are described and not judged: fewer than were declared are no run that decides anything. A workload
that came to its end before its experiment was cut off has its verdicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness import across_runs, comparison, floors, printing, store
from harness.block import Block
from harness.printing import Format


def described(folder: Path) -> dict[str, Any] | None:
    """The object of `--format json` of a run's finished blocks, without a verdict where there should be more;
    None where there is no block. Raises StoreError."""
    manifest, finished = store.read_manifest(folder), store.finished_blocks(folder)
    if not finished:
        return None
    if (folder / "summary.json").exists():
        return across_runs.result(folder, manifest)
    planned = manifest.design.blocks
    blocks = [Block(number, store.read_block(folder, number)) for number in finished]
    alone = msgspec.structs.replace(manifest.design, blocks=len(blocks), until=None)
    result = comparison.result(msgspec.structs.replace(manifest, design=alone), blocks)
    result["stopped_because"] = f"{len(blocks)} of {planned} blocks are finished: described, not judged"
    if manifest.design.against_itself and manifest.design.plant is None and len(blocks) > 1:
        (equal,) = result["comparisons"]
        spreads = floors.floor_of(manifest, equal).metrics
        own = floors.Shown({name: spread.floor for name, spread in spreads.items()}, ())
        result["comparisons"] = [floors.beside(equal, own)]
    rows = [row for each in result["comparisons"] for row in each["metrics"].values()]
    for effects in result.get("factorial", {}).get("metrics", {}).values():
        rows += effects["effects"]
    for row in rows:
        row["verdict"] = None
    return result


def runs(folder: Path) -> Iterator[Path]:
    """The folder itself, or those of an experiment's workloads."""
    if (folder / "manifest.json").exists():
        yield folder
    else:
        yield from sorted(each.parent for each in folder.glob("*/manifest.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for folder in parser.parse_args().folders:
        for run in runs(folder):
            result = described(run)
            if result is None:
                print(f"{run}: no block is finished\n")
            else:
                printing.show(result, Format.MARKDOWN)


if __name__ == "__main__":
    main()
