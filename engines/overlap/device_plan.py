"""What an engine's options and toggles put on its device: the module with its programs, and handles on their
metadata."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from overlap_bench.engines.api import EngineOptions
from overlap_bench.engines.devices.base import Buffer, Device, ModuleSpec
from overlap_bench.engines.overlap.config import ModelConfig
from overlap_bench.engines.overlap.toggles import chunk, h2d, spec, tables


def configure(options: EngineOptions, toggles: Mapping[str, str]) -> ModelConfig:
    """It follows from options and toggles (full settings, as EngineSpec.check gives them) alone, so every
    rank has the same."""
    longest = -(-options.max_context // options.block_size)
    return ModelConfig(
        model=options.model,
        dtype=options.dtype,
        seed=options.seed,
        max_batch_size=options.max_batch_size,
        prefill_max_batch_size=min(options.prefill_max_batch_size, options.max_batch_size),
        prefill_max_tokens=options.prefill_max_tokens,
        max_context=options.max_context,
        block_size=options.block_size,
        num_blocks=options.num_blocks or options.max_batch_size * longest + 1,
        prefix_cache=options.prefix_cache,
        sampling=options.sampling,
        scoring=options.scoring,
        chunk_tokens=options.chunk_tokens if chunk.MIXES[toggles["chunk"]] else 0,
        steps=int(toggles["steps"]),
        spec=toggles["spec"],
        drafts=spec.DRAFTS[toggles["spec"]],
        persistent_tables=tables.KEPT[toggles["tables"]],
    )


def module(config: ModelConfig, place: tuple[int, int, str] | None = None) -> ModuleSpec:
    """`place`: of one rank among several (tensor_parallel.join)."""
    arguments = {"config": msgspec.to_builtins(config), "place": place and list(place)}
    return ModuleSpec("overlap_bench.engines.overlap.model:build", arguments)


def metadata(config: ModelConfig, device: Device) -> dict[str, h2d.Metadata]:
    """Every program's metadata buffer on a device that has the module."""
    table_rows: tuple[Buffer, ...] = ()
    if config.persistent_tables:
        width = config.table_row_bytes
        slots = range(config.max_batch_size + 1)
        table_rows = tuple(device.buffer("block_tables", slot * width, width) for slot in slots)
    return {
        name: h2d.Metadata(
            arrays,
            {array.name: device.buffer(name, array.offset, array.nbytes) for array in arrays},
            device.buffer(name),
            table_rows if name.startswith(("decode", "verify")) else (),
        )
        for name, arrays in config.layouts.items()
    }
