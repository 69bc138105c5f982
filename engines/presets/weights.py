"""The presets' weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn

from overlap_bench.engines.presets import Preset


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, nn.Parameter]], preset: Preset, seed: int) -> None:
    """Give float32 parameters on the CPU the preset's weights: a parameter's depend on the seed and its name,
    so that whoever has the same names, as transformers does, gets the same model."""
    layers = preset.config.get("n_layer") or preset.config["num_hidden_layers"]
    spread = preset.config["initializer_range"]
    for name, parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        # As GPT-2's authors did: what adds to the residual stream is the smaller the more layers add to it.
        deep = name.endswith("c_proj.weight")
        draws = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        parameter.normal_(0.0, spread / (2 * layers) ** 0.5 if deep else spread, generator=draws)
