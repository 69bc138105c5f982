"""What an engine's options and toggles put on its device: the module with its programs, and where their
metadata goes. It follows from them alone, so that every rank has the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_bench.engines.api import EngineOptions
from overlap_bench.engines.devices.base import Buffer, Device, ModuleSpec
from overlap_bench.engines.overlap.layout import (
    ITEM_BYTES,
    Array,
    families,
    lay_out_all,
    nbytes,
    program_name,
)
from overlap_bench.engines.overlap.scheduler import Limits
from overlap_bench.engines.overlap.toggles import graph, h2d, spec


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Sizes up to `most`: powers of two and the halves between them (1 2 3 4 6 8 12 16 ...), so that
    a bucket is never more than a third empty and few programs have to be captured."""
    sizes = {most}
    for power in (1 << exponent for exponent in range(most.bit_length())):
        sizes |= {size for size in (power, power + power // 2) if size < most}
    return tuple(sorted(sizes))


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """`toggles` are full settings, as EngineSpec.check gives them."""

    options: EngineOptions
    toggles: Mapping[str, str]

    @property
    def limits(self) -> Limits:
        options = self.options
        return Limits(
            max_batch_size=options.max_batch_size,
            prefill_max_batch_size=min(options.prefill_max_batch_size, options.max_batch_size),
            prefill_max_tokens=options.prefill_max_tokens,
            batch_buckets=bucket_sizes(options.max_batch_size),
            block_buckets=bucket_sizes(-(-options.max_context // options.block_size)),
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def num_blocks(self) -> int:
        limits = self.limits
        return self.options.num_blocks or limits.max_batch_size * limits.block_buckets[-1] + 1

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(batch, blocks) of each decode program."""
        limits = self.limits
        return [(rows, blocks) for rows in limits.batch_buckets for blocks in limits.block_buckets]

    @property
    def prefill_tokens(self) -> int:
        """The most tokens of one prefill: a preempted request is prefilled again with all its tokens, alone
        if they are too many."""
        return max(self.options.prefill_max_tokens, self.options.max_context)

    @property
    def families(self) -> list[str]:
        """How tokens are chosen in the programs."""
        return families(self.options.sampling, self.options.scoring)

    @property
    def steps(self) -> int:
        """Decode steps of one call of the scheduler."""
        return int(self.toggles["steps"])

    @property
    def drafts(self) -> int:
        """Tokens that a decode step tries for each request."""
        return spec.DRAFTS if self.toggles["spec"] == "ngram" else 0

    @property
    def gives(self) -> int:
        """Tokens that a decode step gives each request at most."""
        return self.drafts + 1 if self.drafts else self.steps

    @property
    def chunk_tokens(self) -> int:
        """Tokens of prompts in a mixed step; 0: there are none."""
        return self.options.chunk_tokens if self.toggles["chunk"] == "on" else 0

    @property
    def persistent_tables(self) -> bool:
        return self.toggles["tables"] == "dirty-rows"

    @property
    def layouts(self) -> dict[str, tuple[Array, ...]]:
        """Every program's metadata, as the module lays it out."""
        limits = self.limits
        return lay_out_all(
            prefill_max_tokens=self.prefill_tokens,
            prefill_max_batch_size=limits.prefill_max_batch_size,
            decode_shapes=self.shapes,
            prefix_cache=self.options.prefix_cache,
            families=self.families,
            persistent_tables=self.persistent_tables,
            chunk_tokens=self.chunk_tokens,
            drafts=self.drafts > 0,
        )

    @property
    def table_row_bytes(self) -> int:
        """The size of one request's row in the block tables that the device keeps."""
        return self.limits.block_buckets[-1] * ITEM_BYTES["int32"]

    @property
    def step_bytes(self) -> int:
        """The most that a step is told: its metadata, and a changed row for each request."""
        most = max(nbytes(arrays) for arrays in self.layouts.values())
        return most + self.limits.max_batch_size * self.table_row_bytes * self.persistent_tables

    def module(self, place: tuple[int, int, str] | None = None) -> ModuleSpec:
        """`place`: of one rank among several (tensor_parallel.join)."""
        options, limits = self.options, self.limits
        arguments: dict[str, Any] = {
            "model": options.model,
            "dtype": options.dtype,
            "seed": options.seed,
            "max_batch_size": limits.max_batch_size,
            "prefill_max_batch_size": limits.prefill_max_batch_size,
            "prefill_max_tokens": self.prefill_tokens,
            "max_context": options.max_context,
            "num_blocks": self.num_blocks,
            "block_size": options.block_size,
            "decode_shapes": [list(shape) for shape in self.shapes],
            "prefix_cache": options.prefix_cache,
            "families": self.families,
            "persistent_tables": self.persistent_tables,
            "steps": self.steps,
            "chunk_tokens": self.chunk_tokens,
            "drafts": self.drafts,
        }
        if place is not None:
            arguments["place"] = list(place)
        return ModuleSpec("overlap_bench.engines.overlap.model:build", arguments)

    def prepare(self, device: Device) -> None:
        """Make the decode programs of a loaded module ready, as the graph toggle says."""
        kind = "verify" if self.drafts else "decode"
        programs = [program_name(kind, family) for family in self.families]
        graph.PREPARE[self.toggles["graph"]](device, programs, self.shapes)

    def metadata(self, device: Device) -> dict[str, h2d.Metadata]:
        """Every program's metadata buffer on a device that has the module."""
        table_rows: tuple[Buffer, ...] = ()
        if self.persistent_tables:
            width = self.table_row_bytes
            slots = range(self.limits.max_batch_size + 1)
            table_rows = tuple(device.buffer("block_tables", slot * width, width) for slot in slots)
        return {
            name: h2d.Metadata(
                arrays,
                {array.name: device.buffer(name, array.offset, array.nbytes) for array in arrays},
                device.buffer(name),
                table_rows if name.startswith(("decode", "verify")) else (),
            )
            for name, arrays in self.layouts.items()
        }
