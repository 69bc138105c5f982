"""The tables of a block, as parquet: blocks/000/{requests,steps,rounds,work,divergences,slices}.parquet; and
a block as it is read back."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_bench.engines import api
from overlap_bench.harness.common.names import of_today
from overlap_bench.harness.metrics import divergences
from overlap_bench.harness.store.files import (
    PARTIAL,
    StoreError,
    WriteFailed,
    reason_of,
    to_parquet,
    written_whole,
)

if TYPE_CHECKING:
    import pandas as pd

    from overlap_bench.harness.metrics.block import Values

# What a block may hold; a table without rows has no file.
TABLES = ("requests", "steps", "rounds", "work", "divergences", "slices")
NEEDED = ("requests", "rounds")
COLUMNS = {  # without which a table can't be what a runner wrote; of api.STAMPS those that every run has
    "requests": (
        "request", "scheduled_ns", "sent_ns", "submitted_ns", "accepted_ns", "tokenized_ns", "admitted_ns",
        "chunk_ns", "chunk_tokens", "token_ns", "finished_ns", "reason", "prompt_tokens",
        "completion_tokens", "digest", "error",
    ),
    "steps": (
        "step", "kind", "batch", "dropped", "preempted", "device_start_ns", "device_end_ns", "device_ns",
        *(f"{phase}.{edge}" for phase in api.PHASES for edge in ("start", "end")),
    ),
    "rounds": ("started_ns", "ended_ns"),
    "work": ("kind", "step", "start_ns", "end_ns"),
    "slices": (
        "turn", "first_step", "steps", "batch", "tokens", "interval_ns", "device_ns", "turn_ns", "parked_ns",
        "parked_cpu_ns",
    ),
    "divergences": (
        "request", "before", "agreed", "before_token", "after_token", "before_gap", "after_gap", "near_tie",
    ),
}  # fmt: skip
STAMPS = ("_ns", ".start", ".end")
LISTS = ("chunk_ns", "chunk_tokens", "chunk_lag_ns", "token_ns", "agreed")  # an array of integers a row
TEXTS = ("arm", "before", "node", "kind", "reason", "digest", "error", "metric")
NUMBERS = dict.fromkeys(("round", "block", "prompt_tokens", "completion_tokens"), "iu")  # no fractions

VALUES_FILE = "values.parquet"


def read_values(folder: Path, arms: Collection[str]) -> pd.DataFrame:
    """What was made of each block and of each of these arms, a row each, of a run that is kept without its
    tables, as those in results/reference are. Raises StoreError."""
    import pandas as pd

    path = folder / VALUES_FILE
    found = _from_parquet(path)
    if not len(found) or set(found) != {"block", "arm", "metric", "value"} or _strange(found, ()):
        raise StoreError(f"{path} was edited: it has other columns, or no row, or something else in them")
    columns = dict(iter(found.assign(metric=found["metric"].map(of_today)).groupby("metric", sort=False)))
    rows, *others = (each[["block", "arm"]].reset_index(drop=True) for each in columns.values())
    measured = set(zip(rows["block"], map(str, rows["arm"]), strict=True))
    whole = measured == set(product(set(rows["block"]), arms)) and len(measured) == len(rows)
    if not whole or not all(each.equals(rows) for each in others):
        raise StoreError(f"{path} was edited: it does not have one value of each arm in each trial")
    # In one piece: pandas warns of a frame to which a hundred columns were added one by one.
    values = pd.DataFrame({metric: each["value"].to_numpy() for metric, each in columns.items()})
    return pd.concat([rows, values], axis=1)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write or replace a parquet file and its folder, whole or not at all. Raises WriteFailed."""
    with written_whole(path) as partial:
        to_parquet(partial, table)


def write_block(folder: Path, block: int, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write one whole block. Raises WriteFailed."""
    write_packed(folder, block, packed(tables))


def packed(tables: Mapping[str, pd.DataFrame]) -> dict[str, bytes]:
    """The parquet file of each table, as they are written, or sent from the machine that measured them."""
    files = {}
    for name, table in tables.items():
        if len(table) or name in NEEDED:
            to_parquet(file := io.BytesIO(), table)
            files[name] = file.getvalue()
    return files


def write_packed(folder: Path, block: int, files: Mapping[str, bytes]) -> None:
    """Write one whole block's files; what a killed run left of it is dropped first. Raises WriteFailed."""
    whole = _block_folder(folder, block)
    partial = whole.with_name(whole.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(exist_ok=True)  # its run's folder must be there: no block without a manifest
        partial.mkdir()
        for name, file in files.items():
            (partial / f"{name}.parquet").write_bytes(file)
        os.rename(partial, whole)
    except OSError as error:
        raise WriteFailed(f"can't write trial {block} to {whole}: {reason_of(error)}") from error


def whole(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables of a block as `read_block` gives them: every one, without rows where there are none."""
    return {
        name: tables[name] if name in tables and (name in NEEDED or len(tables[name])) else _empty(name)
        for name in TABLES
    }


def _empty(name: str) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns=["arm", "round", *COLUMNS[name]])


def finished_blocks(folder: Path) -> list[int]:
    """The numbers of the whole blocks, ascending."""
    try:
        names = [each.name for each in (folder / "blocks").iterdir() if each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):  # another error does not mean that there are none
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_block(folder: Path, block: int) -> dict[str, pd.DataFrame]:
    """Every table of one block; one that has no file has its columns and no rows. Raises StoreError where a
    file is missing, cut short or edited."""
    return {name: read_table(folder, block, name) for name in TABLES}


def read_table(folder: Path, block: int, name: str) -> pd.DataFrame:
    """One table of a block, as read_block gives it. Raises StoreError."""
    path = table_path(folder, block, name)
    if not path.exists() and name not in NEEDED:
        return _empty(name)
    table = _from_parquet(path)
    missing = next((each for each in ("arm", "round", *COLUMNS[name]) if each not in table), None)
    if missing:
        raise StoreError(f"{path} was edited: it has no column '{missing}'")
    if strange := _strange(table, (*COLUMNS[name], *api.STAMPS)):
        column, wanted = strange
        raise StoreError(f"{path} was edited: its column '{column}' holds something other than {wanted}")
    return table


def _from_parquet(path: Path) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(path).read().to_pandas()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise StoreError(f"{path} is damaged or was edited: {reason_of(error)}") from error


def _strange(table: pd.DataFrame, known: Collection[str]) -> tuple[str, str] | None:
    """The first column that holds what no runner writes into it, and what it should hold."""
    for name in table if len(table) else ():
        column = table[name]
        if name in LISTS:
            if not all(getattr(each, "dtype", None) == "int64" for each in column):
                return name, "lists of integers"
        elif name in known and name.endswith(STAMPS):
            if column.dtype.kind != "i":
                return name, "integers"
        elif name in TEXTS:
            if not _are_texts(column):
                return name, "texts"
        elif column.dtype.kind not in NUMBERS.get(name, "iufb"):
            return name, "numbers"
    return None


def _are_texts(column: pd.Series) -> bool:
    if column.dtype == "str":  # of pandas 3, which holds nothing but texts and NaN
        return not column.hasnans
    return all(issubclass(each, str) for each in set(map(type, column)))


def table_path(folder: Path, block: int, table: str) -> Path:
    return _block_folder(folder, block) / f"{table}.parquet"


def _block_folder(folder: Path, block: int) -> Path:
    return folder / "blocks" / f"{block:03d}"


@dataclass(frozen=True, slots=True, eq=False)
class Unkept(Mapping[str, "pd.DataFrame"]):
    """Tables that are read, or made, each time that one is wanted, and that nobody keeps."""

    read: Callable[[str], pd.DataFrame]
    names: Collection[str] = TABLES

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Block:
    """Its number and its tables, each with the column `arm`. `values`: those of its run's metrics, where the
    node of a cluster that measured it has made them."""

    number: int
    tables: Mapping[str, pd.DataFrame]
    values: Values | None = None

    @property
    def node(self) -> str:
        """The node of a cluster that measured it; "" where the machine of its run did."""
        rounds = self.tables["rounds"]
        return str(rounds["node"].iloc[0]) if "node" in rounds and len(rounds) else ""

    def of(self, arm: str, table: str) -> pd.DataFrame:
        frame = self.tables[table]
        return frame[frame["arm"].to_numpy() == arm] if len(frame) else frame

    def only(self, arms: Sequence[str]) -> Block:
        """The same block without the other arms, and without the divergences of these from others."""
        return Block(self.number, Unkept(partial(self._only, arms), self.tables.keys()))

    def _only(self, arms: Sequence[str], table: str) -> pd.DataFrame:
        frame = self.tables[table]
        if table == "divergences":
            return divergences.between(frame, arms)
        return frame[frame["arm"].isin(arms)] if len(frame) else frame


def stored_block(folder: Path, number: int) -> Block:
    """A block that was measured before. Raises StoreError where it can't be read any more."""
    return Block(number, {name: stored_table(folder, number, name) for name in TABLES})


def stored_table(folder: Path, number: int, name: str) -> pd.DataFrame:
    """One table of it. Raises StoreError."""
    try:
        return read_table(folder, number, name)
    except StoreError as error:
        error.add_note(f"remove {folder / 'blocks' / f'{number:03d}'}, and --resume measures it again")
        raise
