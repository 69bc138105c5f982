"""Who owns which KV block. Blocks live on the device; their numbers are handed out here."""

from __future__ import annotations


class BlockPool:
    """Free KV blocks. Block 0 is never handed out: padding rows write into it. The block given back last is
    handed out first: its memory is warm."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many blocks can be handed out now."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has checked `free`."""
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that no launched step reads or writes any more. Giving one back twice is a bug, said loudly:
        it would end up with two owners, and each would overwrite the other's keys."""
        for block in blocks:
            self._taken.remove(block)  # KeyError: given back twice
        self._free.extend(reversed(blocks))
