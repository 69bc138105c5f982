"""The sizes that scheduler, programs and metadata are made for."""

from __future__ import annotations

import msgspec

from overlap_bench.engines.overlap import layout


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Sizes up to `most`: powers of two and the halves between them (1 2 3 4 6 8 12 16 ...), so that
    a bucket is never more than a third empty and few programs have to be captured."""
    sizes = {most}
    for power in (1 << exponent for exponent in range(most.bit_length())):
        sizes |= {size for size in (power, power + power // 2) if size < most}
    return tuple(sorted(sizes))


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data: it crosses to the process where the device lives."""

    model: str
    dtype: str = "float32"
    seed: int = 0
    max_batch_size: int
    prefill_max_batch_size: int
    prefill_max_tokens: int  # padded; a preempted request may have more, and then runs alone
    max_context: int
    block_size: int
    num_blocks: int
    prefix_cache: bool = False
    sampling: bool = False  # whether a request may ask for a temperature
    scoring: bool = False  # whether a request may bring forced tokens
    chunk_tokens: int = 0  # padded, of prompts in a mixed step; 0: there is none
    steps: int = 1  # of decode, of one call of the scheduler
    spec: str = "off"  # how tokens are found that a decode step tries
    drafts: int = 0  # how many of them for each request
    persistent_tables: bool = False  # whether the device keeps the block tables

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Ascending; the last one is max_batch_size."""
        return bucket_sizes(self.max_batch_size)

    @property
    def block_buckets(self) -> tuple[int, ...]:
        """Ascending; the last one holds the longest request."""
        return bucket_sizes(-(-self.max_context // self.block_size))

    @property
    def decode_shapes(self) -> list[tuple[int, int]]:
        """(rows, blocks) of each decode program."""
        return [(rows, blocks) for rows in self.batch_buckets for blocks in self.block_buckets]

    @property
    def prefill_tokens(self) -> int:
        """The most tokens of one prefill: a preempted request is prefilled again with all its tokens, alone
        if they are too many."""
        return max(self.prefill_max_tokens, self.max_context)

    @property
    def gives(self) -> int:
        """Tokens that a decode step gives each request at most."""
        return self.drafts + 1 if self.drafts else self.steps

    @property
    def families(self) -> list[str]:
        """How tokens are chosen in the programs."""
        sampled = ["sampled", "filtered"] if self.sampling else []
        return ["greedy", *sampled, *(["scored"] if self.scoring else [])]

    @property
    def decode_programs(self) -> list[str]:
        kind = "verify" if self.drafts else "decode"
        return [layout.program_name(kind, family) for family in self.families]

    @property
    def layouts(self) -> dict[str, tuple[layout.Array, ...]]:
        """Every metadata buffer by its name: one per prefill program, one per program of mixed steps where
        prompts go in chunks, one per decode program and shape. With persistent tables, a decode step is told
        none."""
        layouts, most_blocks = {}, self.block_buckets[-1]
        for family, decode in zip(self.families, self.decode_programs, strict=True):
            prompts = self.prefill_tokens, self.prefill_max_batch_size
            layouts[layout.program_name("prefill", family)] = layout.lay_out(*prompts, 0, family)
            if self.prefix_cache:
                name = layout.program_name("extend", family)
                layouts[name] = layout.lay_out(*prompts, most_blocks, family)
            if self.chunk_tokens:
                name, most = layout.program_name("mixed", family), self.chunk_tokens + self.max_batch_size
                layouts[name] = layout.lay_out(most, self.max_batch_size, most_blocks, family)
            for rows, blocks in self.decode_shapes:
                told = 0 if self.drafts else rows, rows, 0 if self.persistent_tables else blocks
                layouts[f"{decode}.{rows}.{blocks}"] = layout.lay_out(*told, family)
        return layouts

    @property
    def table_row_bytes(self) -> int:
        """The size of one request's row in the block tables that the device keeps."""
        return self.block_buckets[-1] * layout.ITEM_BYTES["int32"]

    @property
    def step_bytes(self) -> int:
        """The most that a step is told: its metadata, and a changed row for each request."""
        most = max(layout.nbytes(arrays) for arrays in self.layouts.values())
        return most + self.max_batch_size * self.table_row_bytes * self.persistent_tables
