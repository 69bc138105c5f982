"""Where a step's metadata lies in memory: one description, used by the host that writes it and by the
program that reads it on the device.

A step is told which tokens to run (input_ids, position_ids), where their keys and values go (slot_mapping),
how far each request reaches back (context_lens), where its future token is kept (request_slots), and where
its past lies (block_tables, if it has one; not in a decode step where tables=dirty-rows has the device keep
them). The first four are the arrays of roseinfer's CUDA-graph path.

How tokens are chosen makes families of each program, so that no step is told or does more than it needs: all
greedy, some sampled, some sampled behind a filter, which takes a sort; and some forced and scored.
"""

from __future__ import annotations

from dataclasses import dataclass

# 8-byte arrays first: every array then begins on a multiple of its own item size.
DTYPES = {
    "input_ids": "int64",  # [tokens]; -1 - slot stands for the token that `slot` is about to get
    "position_ids": "int64",  # [tokens]
    "seeds": "int64",  # [batch]
    "targets": "int64",  # [batch]: the token that is forced and scored; NO_TARGET: the most likely one
    "slot_mapping": "int32",  # [tokens]: block * block_size + place in the block
    "context_lens": "int32",  # [batch]: tokens of the request so far, this step's included
    "request_slots": "int32",  # [batch]
    "block_tables": "int32",  # [batch, blocks], flat
    "temperatures": "float32",  # [batch]; 0: greedy
    "top_ks": "int32",  # [batch]; 0: all
    "top_ps": "float32",  # [batch]; 1: all
}
ITEM_BYTES = {"int64": 8, "int32": 4, "float32": 4}
FAMILIES = {
    "greedy": (),
    "sampled": ("seeds", "temperatures"),
    "filtered": ("seeds", "temperatures", "top_ks", "top_ps"),
    "scored": ("targets",),
}
NO_TARGET = -1

DUMMY_SLOT = 0  # block 0 belongs to nobody: padding puts its keys and values there


@dataclass(frozen=True, slots=True)
class Array:
    """One array inside a metadata buffer: `count` items of `dtype` from byte `offset` on."""

    name: str
    dtype: str
    offset: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


def program_name(kind: str, family: str) -> str:
    """What the program of a kind ("prefill", "extend", "mixed", "decode", "verify") is called in a family."""
    return kind if family == "greedy" else f"{kind}_{family}"


def lay_out(tokens: int, batch: int, blocks: int, family: str = "greedy") -> tuple[Array, ...]:
    """The arrays of a step of `batch` requests, `tokens` tokens in all and `blocks` blocks per request. One
    that is told no tokens (under speculation the device knows them) is told no lengths either."""
    counts = {
        "input_ids": tokens,
        "position_ids": tokens,
        "slot_mapping": tokens,
        "context_lens": batch if tokens else 0,
        "request_slots": batch,
        "block_tables": batch * blocks,
        **dict.fromkeys(FAMILIES[family], batch),
    }
    arrays, offset = [], 0
    for name, dtype in DTYPES.items():
        if counts.get(name):
            arrays.append(Array(name, dtype, offset, counts[name]))
            offset += arrays[-1].nbytes
    return tuple(arrays)


def nbytes(arrays: tuple[Array, ...]) -> int:
    return arrays[-1].offset + arrays[-1].nbytes
