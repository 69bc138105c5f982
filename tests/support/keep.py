"""What of a finished run is committed: `python -m tests.support.keep FOLDER ... [--tables T,...]`.

What stays: manifest.json, summary.json, values.parquet, and of the blocks the tables that are named (none).
The manifest says what was left out. Of an experiment this is done to each of its runs, and what it found goes
to a summary.json of its own. The numbers stay what they are: bench compare, factorial, experiment show and
report read the summary, and what needs the records says that they are gone.
"""

import argparse
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from overlap_bench.engines import api
from overlap_bench.harness.analysis import frames
from overlap_bench.harness.analysis.plain import to_stored
from overlap_bench.harness.store.files import EXPERIMENT_FILE, SUMMARY_FILE, write_bytes
from overlap_bench.harness.store.tables import (
    NEEDED,
    TABLES,
    VALUES_FILE,
    finished_blocks,
    read_table,
    table_path,
    write_table,
)
from overlap_bench.harness.studies import experiment


def keep(run: Path, tables: Collection[str] = ()) -> None:
    """Leave all but `tables` out of a finished run's blocks, and write those anew. Raises StoreError for a
    run that is not finished or is damaged, and BadSetting for tables that make no block."""
    if tables and not set(NEEDED) <= set(tables) <= set(TABLES):
        raise api.BadSetting(
            f"a trial needs {' and '.join(NEEDED)}, and has no others than {', '.join(TABLES)}"
        )
    stored = frames.load(run)
    result = stored.result  # before anything is removed: it is made from all of it
    gone = [name for name in TABLES if name not in tables and any(run.glob(f"blocks/*/{name}.parquet"))]
    left_out = [name for name in TABLES if name in (*stored.manifest.left_out, *gone)]
    if left_out:
        _write_on_one_line(run / SUMMARY_FILE, to_stored(result))
        write_values(run, stored.values.rename(columns={"trial": "block"}))
        manifest = msgspec.structs.replace(stored.manifest, left_out=left_out)
        _write_on_one_line(run / "manifest.json", manifest)
    for number in finished_blocks(run):
        for name in TABLES:
            path = table_path(run, number, name)
            if name not in tables:
                path.unlink(missing_ok=True)
            elif path.exists():
                write_table(path, read_table(run, number, name))
    if not tables:
        shutil.rmtree(run / "blocks", ignore_errors=True)


def keep_experiment(folder: Path, tables: Collection[str] = ()) -> None:
    """The same of each run of an experiment, and what it found beside them."""
    found = experiment.show(folder).result
    if set(tables) != set(TABLES):
        _write_on_one_line(folder / SUMMARY_FILE, to_stored(found))
    for run in experiment.read(folder).runs(folder).values():
        keep(run, tables)


def write_values(folder: Path, values: pd.DataFrame) -> None:
    """A row of the file is one value: a column for each metric would take more room for itself than for what
    is in it."""
    write_table(folder / VALUES_FILE, values.melt(["block", "arm"], var_name="metric"))


def _write_on_one_line(path: Path, content: Any) -> None:
    """Indented, half of a small run's file would be spaces."""
    write_bytes(path, msgspec.json.encode(content) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+")
    parser.add_argument("--tables", default="", help="what stays of the trials: " + ",".join(TABLES))
    asked = parser.parse_args()
    tables = [name for name in asked.tables.split(",") if name]
    for folder in asked.folders:
        if (folder / EXPERIMENT_FILE).exists():
            keep_experiment(folder, tables)
        else:
            keep(folder, tables)


if __name__ == "__main__":
    main()
