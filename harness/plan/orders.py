"""What is drawn for a run: the order of the arms in each block, and the seed of each round."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b

DRAWN_TOGETHER = 6  # blocks whose orders are drawn together, so that both are among them


def orders(lot: str, block: int, arms: int, fewest: int = DRAWN_TOGETHER) -> list[int]:
    """The arms of `block` by number, in the order in which they run: each order is as likely as any other,
    and independent of other blocks and of runs with another lot.

    With one exception: six blocks (0 to 5, 6 to 11, ...) in which some arm always ran before the first arm,
    or always after it, are drawn again; of two arms so are the `fewest` blocks that the run may be judged by,
    where they are two to five. With two arms, one run in 32 would draw that in six blocks, and could not tell
    a position effect from the change. The first of many arms then runs at an end more often than in the
    middle, at both ends alike: with four arms by 1%, with sixteen by 11%. Orders that are balanced further
    resonate with periodic noise: one of each order in every two blocks gives 14% false alarms, where this
    gives 5 to 6% (stats.md).
    """
    together = min(DRAWN_TOGETHER, fewest) if arms == 2 else DRAWN_TOGETHER
    place, attempt = block % together, 0
    while True:
        group = [
            sorted(range(arms), key=partial(_draw, lot, "order", block - place + number, attempt))
            for number in range(together)
        ]
        ahead = [{order.index(arm) < order.index(0) for order in group} for arm in range(1, arms)]
        if together == 1 or all(len(found) == 2 for found in ahead):
            return group[place]
        attempt += 1


def workload_order(seed: int, block: int, index: int, workloads: int) -> list[int]:
    """The workloads that share a boot, by number, in the order in which they have their turn in one round:
    each order is as likely as any other, so that none always runs behind the same one."""
    return sorted(range(workloads), key=lambda workload: _draw(seed, "workload", block, index, workload))


def turn_order(lot: str, block: int, segment: int, arms: int) -> list[int]:
    """The arms by number, in the order of their turns in one segment: each is as likely as any other."""
    return sorted(range(arms), key=partial(_draw, lot, "turn", block, segment))


def segment_seed(seed: int, block: int, segment: int) -> int:
    """Seed of what a segment asks; every arm gets the same."""
    return _draw(seed, "segment", block, segment)


def round_seed(seed: int, block: int, index: int) -> int:
    """Seed of one round's prompts and arrivals; both arms of a block get the same. Warm-up rounds are
    numbered below zero, and block -1 is the discarded one."""
    return _draw(seed, "round", block, index)


def _draw(*parts: object) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
