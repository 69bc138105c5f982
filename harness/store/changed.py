"""What the code of two arms differs by, and what of it ran: found in the boots that are thrown away."""

from __future__ import annotations

import msgspec

SHOWN = 3  # names of a kind, in a line


class Overlaid(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled or generated file that no ref has, laid over the tree of each."""

    file: str  # in the repository
    sha256: str


class ChangedCode(msgspec.Struct, frozen=True, kw_only=True):
    """The Python code that differs, as "vllm/v1/core/block_pool.py: BlockPool.touch", by when it ran.
    `other`: files that differ and are no Python, `used` those of them that were loaded or opened."""

    packages: list[str] = []  # that were compared; none: the trees of two refs
    functions: int  # that differ
    in_rounds: list[str]
    at_boot: list[str]  # and not in a round
    never: list[str]
    unseen: list[str]  # compiled, and so run without Python
    other: list[str]
    used: list[str]
    besides: list[str] = []  # other packages that both arms loaded, in two versions
    unwatched: str = ""  # processes that could not be seen, in words
    counts: bool = True  # whether what differs ran, or may have: else there is nothing to judge

    @property
    def never_ran(self) -> str:
        """Why there is nothing to judge, in words."""
        what = f"none of the {self.functions} functions that differ ran in a round"
        if self.functions < 2:
            what = "the code that differs ran in no round"
        booted = f"; ran only as the engine booted: {listed(self.at_boot)}" if self.at_boot else ""
        return f"{what}: {listed(self.never)}{booted}"


def listed(names: list[str], most: int = SHOWN) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
