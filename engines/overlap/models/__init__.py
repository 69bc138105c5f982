"""The models an engine runs, all behind one contract: embeddings and layers in, logits out, attention left to
the step.

The presets' two families are written out here, gpt2.py and llama.py: as much of each as a forward needs, and
nothing else to import. transformers' own takes 2 s of a boot, 2 to 4 of which a block has. What is published,
of whatever family, runs on transformers' code (published.py).
"""

from __future__ import annotations

import torch

from engines.overlap.models.contract import Model, refusing
from engines.overlap.models.gpt2 import GPT2
from engines.overlap.models.llama import Llama
from engines.overlap.models.weights import fill
from engines.overlap.presets import PRESETS, Preset


def open_model(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Model:
    """The model of that name; `seed` makes a preset's weights. BadSetting for one that does not exist or that
    this engine can't run."""
    if name in PRESETS:
        return make(PRESETS[name], dtype, device, seed)
    from engines.overlap.models.published import Published

    with refusing(name):
        return Published(name, dtype, device, seed)


def make(preset: Preset, dtype: torch.dtype, device: torch.device, seed: int) -> Model:
    """A preset with its weights."""
    family: type[GPT2] | type[Llama] = {"gpt2": GPT2, "llama": Llama}[preset.model_type]
    model = family(**preset.config)
    fill(model.root.named_parameters(), preset, seed)
    model.root.to(device, dtype).eval()
    model.prepare(device)
    return model
