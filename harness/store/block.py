"""A finished block of a run, as it is read back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_bench.harness.metrics import divergences
from overlap_bench.harness.store.files import StoreError
from overlap_bench.harness.store.tables import TABLES, read_table

if TYPE_CHECKING:
    import pandas as pd

    from overlap_bench.harness.metrics.block import Values


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
