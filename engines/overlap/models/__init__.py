"""The models an engine runs, all behind one contract: embeddings and layers in, logits out, attention left to
the step.

The presets' two families are written out here, gpt2.py and llama.py: as much of each as a forward needs, and
nothing else to import. transformers' own takes 2 s of a boot, 2 to 4 of which a block has. What is published,
of whatever family, runs on transformers' code (published.py).
"""

from __future__ import annotations

import torch

from overlap_bench.engines.overlap.models.contract import Model, refusing
from overlap_bench.engines.overlap.models.gpt2 import GPT2
from overlap_bench.engines.overlap.models.llama import Llama
from overlap_bench.engines.overlap.models.tensor_parallel import Group, shard
from overlap_bench.engines.presets import PRESETS
from overlap_bench.engines.presets.weights import fill


def open_model(
    name: str, dtype: torch.dtype, device: torch.device, seed: int, group: Group | None = None
) -> Model:
    """The model of that name, or `group`'s part of it; `seed` makes a preset's weights. BadSetting for one
    that does not exist or that this engine can't run."""
    if name in PRESETS:
        return make(name, dtype, device, seed, group)
    from overlap_bench.engines.overlap.models.published import Published

    with refusing(name):
        return Published(name, dtype, device, seed, group)


def make(name: str, dtype: torch.dtype, device: torch.device, seed: int, group: Group | None = None) -> Model:
    preset = PRESETS[name]
    family: type[GPT2] | type[Llama] = {"gpt2": GPT2, "llama": Llama}[preset.model_type]
    model = family(**preset.config)
    fill(model.root.named_parameters(), preset, seed)
    if group is not None:
        model.shape = group.part_of(model.shape, name)
        shard(model.base, model.plan, group, name)
    model.root.to(device, dtype).eval()
    model.prepare(device)
    return model
