"""How steady a decode step is by itself, for models of different size: `python -m experiments.shared_cache`.

One process, one core, no host and no queue: the decode program of a model, over and over. What changes from
one window of 0.3 s to the next is the machine's doing. A core has its first two caches to itself; the last
one it shares, on a rented machine with strangers. A model that does not fit the private ones is read through
the shared one in each step, at the mercy of whoever else uses it meanwhile. Hence the shape of the tiny
presets: long steps out of many small layers.
"""

from __future__ import annotations

import os
from time import perf_counter_ns

import numpy as np
import torch

from engines.overlap import presets
from engines.overlap.model import OverlapModule, build
from experiments.record import write_result

SHAPES = ((4, 256), (4, 128), (8, 96), (8, 64))  # layers, hidden size
BATCHES = (8, 32)
BLOCKS = 6  # KV blocks per request: contexts of 90 tokens
WINDOW_NS = 300_000_000
WINDOWS = 20


def load(layers: int, hidden: int) -> OverlapModule:
    """tiny-gpt2 in another shape, its KV blocks handed out in order."""
    config = presets.PRESETS["tiny-gpt2"].config | {"n_layer": layers, "n_embd": hidden}
    name = f"gpt2-{layers}x{hidden}"
    presets.PRESETS[name] = presets.Preset(name, "gpt2", config)
    module = build(
        torch.device("cpu"),
        model=name,
        dtype="float32",
        seed=0,
        max_batch_size=max(BATCHES),
        prefill_max_batch_size=1,
        prefill_max_tokens=64,
        num_blocks=max(BATCHES) * BLOCKS + 1,
        block_size=16,
        decode_shapes=[[batch, BLOCKS] for batch in BATCHES],
        prefix_cache=False,
        families=["greedy"],
        persistent_tables=False,
    )
    for batch in BATCHES:
        arrays = module._arrays[f"decode.{batch}.{BLOCKS}"]
        arrays["block_tables"].copy_(torch.arange(1, batch * BLOCKS + 1))
        arrays["context_lens"].fill_(BLOCKS * 16 - 6)
    return module


def window(module: OverlapModule, batch: int) -> float:
    """Median decode step of one window, ms."""
    steps = []
    end = perf_counter_ns() + WINDOW_NS
    while (began := perf_counter_ns()) < end:
        module.decode(batch, BLOCKS)
        steps.append(perf_counter_ns() - began)
    return float(np.median(steps)) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    modules = {shape: load(*shape) for shape in SHAPES}
    found: dict[tuple[int, int, int], list[float]] = {}
    with torch.inference_mode():
        for turn in range(WINDOWS + 1):
            for shape, module in modules.items():
                for batch in BATCHES:
                    step = window(module, batch)
                    if turn:  # the first turn warms up
                        found.setdefault((*shape, batch), []).append(step)
    os.sched_setaffinity(0, cores)
    rows = []
    for (layers, hidden, batch), steps in found.items():
        low, middle, high = np.percentile(steps, (10, 50, 90))
        megabytes = sum(each.nbytes for each in modules[layers, hidden].root.parameters()) / 2**20
        rows.append(
            [
                f"{layers} x {hidden}",
                f"{megabytes:.1f}",
                str(batch),
                f"{middle:.2f}",
                f"{(high - low) / middle:.1%}",
            ]
        )
    write_result(
        "shared_cache",
        title="Decode step of one process by itself, in windows of 0.3 s, shapes in turn",
        header=["layers x hidden", "weights, MiB", "batch", "median step, ms", "10th to 90th percentile"],
        rows=rows,
        data={"/".join(map(str, key)): steps for key, steps in found.items()},
    )


if __name__ == "__main__":
    main()
