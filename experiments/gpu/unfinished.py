"""What an unfinished run found so far, in markdown.

    python -m experiments.gpu.unfinished FOLDER [FOLDER ...]

A machine that was lent is taken away again, and nothing can be gone on with there. FOLDER is of any run
(`bench run`, `aa`, `factorial`), or of an experiment, whose workloads are then shown one by one. The finished
blocks are described and not judged: fewer than were declared are no run that decides anything. A workload
that came to its end before its experiment was cut off has its verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from experiments.common import command_line
from overlap_bench.harness.analysis import comparison, noise_floor, stored
from overlap_bench.harness.analysis.result import Result
from overlap_bench.harness.cli import printing
from overlap_bench.harness.cli.printing import Format
from overlap_bench.harness.store import tables
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.store.tables import Block


def described(folder: Path) -> Result | None:
    """What a run's finished blocks say, without a verdict where there should be more;
    None where there is no block. Raises StoreError."""
    manifest, finished = read_manifest(folder), tables.finished_blocks(folder)
    if not finished:
        return None
    if (folder / "summary.json").exists():
        return stored.result(folder, manifest)
    planned = manifest.design.blocks
    blocks = [Block(number, tables.read_block(folder, number)) for number in finished]
    alone = msgspec.structs.replace(manifest.design, blocks=len(blocks), until=None)
    result = comparison.result(msgspec.structs.replace(manifest, design=alone), blocks)
    comparisons = result.comparisons
    if manifest.design.against_itself and manifest.design.plant is None and len(blocks) > 1:
        (equal,) = comparisons
        spreads = noise_floor.floor_of(manifest, equal).metrics
        own = noise_floor.Shown({name: (spread.scale, spread.floor) for name, spread in spreads.items()}, ())
        comparisons = [noise_floor.beside(equal, own)]
    factorial = result.factorial
    if factorial is not None:
        described = {
            name: replace(found, effects=[replace(each, verdict=None) for each in found.effects])
            for name, found in factorial.metrics.items()
        }
        factorial = replace(factorial, metrics=described)
    return replace(
        result,
        stopped_because=f"{len(blocks)} of {planned} blocks are finished: described, not judged",
        comparisons=[
            replace(each, metrics={name: replace(row, verdict=None) for name, row in each.metrics.items()})
            for each in comparisons
        ],
        factorial=factorial,
    )


def runs(folder: Path) -> Iterator[Path]:
    """The folder itself, or those of an experiment's workloads."""
    if (folder / "manifest.json").exists():
        yield folder
    else:
        yield from sorted(each.parent for each in folder.glob("*/manifest.json"))


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
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
