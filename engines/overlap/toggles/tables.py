"""tables: how a decode step learns where the past of its requests lies.

Before (`full`), the block tables of the whole batch are part of each step's metadata. After (`dirty-rows`),
the device keeps one row per request slot; only rows that changed since they were last sent are copied there,
each on its own, by the same h2d choice as the other arrays, and the program gathers its rows by request slot.
The copies come before the program and write to addresses that never change, so it stays capturable.

Claim: named as a follow-up in roseinfer's post, without a number. vLLM 47936 (closed) copies changed rows
one by one, and all at once when half of them changed; vLLM-Ascend 17066 reports block-table copies of 2.72 ->
0.14 ms a step from a profile of an earlier version. vLLM 31965 gave such a scheme up: a full copy per step,
read through mapped memory, was simpler.

What can go wrong: a row that changed and was not marked is stale on the device, and its request reads
another's past. A step that admits many requests pays a copy for each, where the whole table took one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:  # the declaration below is read by command lines that must not wait for numpy
    import numpy as np

TOGGLE = Toggle(
    name="tables",
    module=__name__,
    choices=("full", "dirty-rows"),
    changes="block tables: the whole batch's copied in each step, or only changed rows, into a table that "
    "the device keeps and the program gathers from",
    source="roseinfer (its follow-up); vLLM 47936, vLLM-Ascend 17066",
    counters=("table_rows", "table_bytes"),
    phases=("schedule", "metadata", "h2d"),
)


class Full:
    """Before. One row of block numbers per request slot, and a last one for padding, whose blocks are all
    the dummy block. On the scheduler's thread; every array that is returned is a copy, so rows may change at
    once."""

    def __init__(self, slots: int, blocks: int, counters: dict[str, int]) -> None:
        import numpy as np

        self.rows: np.ndarray = np.zeros((slots, blocks), dtype=np.int32)
        self.padding_slot = slots - 1
        self.counters = counters

    def write(self, slot: int, blocks: list[int]) -> None:
        """`blocks` are all that the slot's request has now. A row changes in no other way."""
        self.rows[slot, : len(blocks)] = blocks
        self.rows[slot, len(blocks) :] = 0

    def read(self, slots: list[int], blocks: int) -> np.ndarray:
        """int32 [slots, blocks], for a prefill after a cached prefix, whatever the choice."""
        rows: np.ndarray = self.rows[slots, :blocks]
        return rows

    def whole(self, slots: list[int], blocks: int) -> dict[str, np.ndarray]:
        """What a decode step of these slots has in its metadata: {"block_tables": int32 [slots, blocks]}, or
        {} where the device keeps them."""
        rows = self.read(slots, blocks)
        self.counters["table_rows"] += len(slots)
        self.counters["table_bytes"] += rows.nbytes
        return {"block_tables": rows}

    def changed(self, slots: list[int]) -> Sequence[tuple[int, np.ndarray]]:
        """What the device must be sent before that step: (slot, int32 [max blocks]) of each changed row."""
        return ()


Tables = Full  # all of them are


class DirtyRows(Full):
    """After. A row is sent with the first step that reads it, so a step never has more than its requests."""

    def __init__(self, slots: int, blocks: int, counters: dict[str, int]) -> None:
        super().__init__(slots, blocks, counters)
        self._dirty: set[int] = set()

    def write(self, slot: int, blocks: list[int]) -> None:
        super().write(slot, blocks)
        self._dirty.add(slot)

    def whole(self, slots: list[int], blocks: int) -> dict[str, np.ndarray]:
        return {}

    def changed(self, slots: list[int]) -> Sequence[tuple[int, np.ndarray]]:
        if not self._dirty:
            return ()
        changed = [(slot, self.rows[slot].copy()) for slot in slots if slot in self._dirty]
        self._dirty.difference_update(slots)
        self.counters["table_rows"] += len(changed)
        self.counters["table_bytes"] += sum(row.nbytes for _, row in changed)
        return changed


KEPT = {"full": False, "dirty-rows": True}  # whether the device keeps the tables
CHOICES: dict[str, Callable[[int, int, dict[str, int]], Tables]] = {"full": Full, "dirty-rows": DirtyRows}
