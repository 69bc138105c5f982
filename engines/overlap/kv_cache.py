"""Who owns which KV block, and which blocks hold a prefix that another request may begin with.

Blocks live on the device; their numbers are handed out here. A full block can be kept under a key made of its
tokens and of the key of the block before it, so equal keys mean equal tokens from the very first one on. Kept
blocks have as many owners as use them; one that nobody uses stays until no free block is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

NO_KEY = b""  # of the block before the first one


def block_key(before: bytes, tokens: list[int]) -> bytes:
    """The key of a full block after the one with key `before`. 128 bits: no collision is to be expected."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """KV blocks. Block 0 is never handed out: padding rows write into it. The block given back last is handed
    out first: its memory is warm. Of kept blocks that nobody uses, the one longest unused goes first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owners = [0] * num_blocks
        self._kept: dict[bytes, int] = {}  # key: block
        self._keys: dict[int, bytes] = {}  # the same the other way round
        self._unused: dict[int, None] = {}  # kept blocks without an owner, the longest unused first

    @property
    def free(self) -> int:
        """How many blocks can be handed out now."""
        return len(self._free) + len(self._unused)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks of which the caller is the only owner; the caller has checked `free`."""
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that no launched step reads or writes any more on their owner's behalf. Giving one back that
        has no owner is a bug, so it raises: it would end up with two, who overwrite each other's KV.

        The last ones of a prefix are evicted first: the others are of use without them.
        """
        for block in reversed(blocks):
            owners = self._owners[block] - 1
            if owners < 0:
                raise ValueError(f"block {block} was given back and has no owner")
            self._owners[block] = owners
            if not owners:
                if block in self._keys:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    # -- prefixes ------------------------------------------------------------------------------------------

    def keep(self, block: int, key: bytes) -> None:
        """This block of the caller's is full, and its tokens are known. Where an equal one is kept already,
        that one stays."""
        if key not in self._kept:
            self._kept[key] = block
            self._keys[block] = key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The kept blocks under these keys, up to the first that is not there."""
        blocks = []
        for key in keys:
            block = self._kept.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unused(self, blocks: list[int]) -> int:
        """How many of them are counted as free."""
        return sum(block in self._unused for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """One more owner for each of these kept blocks."""
        for block in blocks:
            self._owners[block] += 1
            self._unused.pop(block, None)

    def _evict(self) -> int:
        block = next(iter(self._unused))
        del self._unused[block]
        del self._kept[self._keys.pop(block)]
        return block
