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

from collections.abc import Iterable, Sequence
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


def families(sampling: bool, scoring: bool) -> list[str]:
    """The families that an engine started with these options needs."""
    return ["greedy", *(["sampled", "filtered"] if sampling else []), *(["scored"] if scoring else [])]


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


def lay_out_all(
    *,
    prefill_max_tokens: int,
    prefill_max_batch_size: int,
    decode_shapes: Iterable[Sequence[int]],
    prefix_cache: bool,
    families: Iterable[str],
    persistent_tables: bool,
    chunk_tokens: int,
    drafts: bool,
) -> dict[str, tuple[Array, ...]]:
    """Every metadata buffer of a module by its name: one per prefill program, one per program of mixed steps
    where prompts go in chunks, one per decode program and shape (batch, blocks). With persistent tables, a
    decode step is told none."""
    shapes = list(decode_shapes)
    most_requests, most_blocks = (max(each) for each in zip(*shapes, strict=True))
    decode = "verify" if drafts else "decode"
    layouts = {}
    for family in families:
        prompts = prefill_max_tokens, prefill_max_batch_size
        layouts[program_name("prefill", family)] = lay_out(*prompts, 0, family)
        if prefix_cache:
            layouts[program_name("extend", family)] = lay_out(*prompts, most_blocks, family)
        if chunk_tokens:
            most = chunk_tokens + most_requests
            layouts[program_name("mixed", family)] = lay_out(most, most_requests, most_blocks, family)
        for batch, blocks in shapes:
            name = f"{program_name(decode, family)}.{batch}.{blocks}"
            told_blocks = 0 if persistent_tables else blocks
            layouts[name] = lay_out(0 if drafts else batch, batch, told_blocks, family)
    return layouts


def nbytes(arrays: tuple[Array, ...]) -> int:
    return arrays[-1].offset + arrays[-1].nbytes
