"""Two arms of a run that has more, as a run of their own: any two of a block were interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from harness import comparison
from harness.comparison import Block
from harness.store import Manifest


def compared(manifest: Manifest, blocks: Sequence[Block], before: str, after: str) -> dict[str, Any]:
    """The comparison of these two arms, as of a run that had no others."""
    alone = pair(manifest, before, after)
    chosen = [only(block, before, after) for block in blocks]
    per_block = [comparison.block_values(alone.design, block) for block in chosen]
    return comparison.comparison(alone, chosen, per_block)


def pair(manifest: Manifest, before: str, after: str) -> Manifest:
    """The manifest of these two arms alone, as a before and an after."""
    arms = {arm.name: arm for arm in manifest.design.arms}
    turned = list(arms).index(after) < list(arms).index(before)
    return msgspec.structs.replace(
        manifest,
        design=msgspec.structs.replace(manifest.design, arms=(arms[before], arms[after])),
        after_first=[first != turned for first in manifest.after_first],
        descriptions={name: each for name, each in manifest.descriptions.items() if name in (before, after)},
    )


def only(block: Block, before: str, after: str) -> Block:
    """The block without the other arms."""
    return Block(
        block.number,
        {
            name: frame[frame["arm"].isin((before, after))] if len(frame) else frame
            for name, frame in block.tables.items()
        },
    )
