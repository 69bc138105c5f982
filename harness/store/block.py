"""A finished block of a run, as it is read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.metrics import divergences

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Block:
    """Its number and its tables, each with the column `arm`."""

    number: int
    tables: Mapping[str, pd.DataFrame]

    @property
    def node(self) -> str:
        """The node of a cluster that measured it; "" where the machine of its run did."""
        rounds = self.tables["rounds"]
        return str(rounds["node"].iloc[0]) if "node" in rounds and len(rounds) else ""

    def of(self, arm: str, table: str) -> pd.DataFrame:
        frame = self.tables[table]
        return frame[frame["arm"] == arm] if len(frame) else frame

    def only(self, arms: Sequence[str]) -> Block:
        """The same block without the other arms, and without the divergences of these from others."""
        tables = {
            name: frame[frame["arm"].isin(arms)] if len(frame) else frame
            for name, frame in self.tables.items()
        }
        return Block(
            self.number, tables | {"divergences": divergences.between(self.tables["divergences"], arms)}
        )
