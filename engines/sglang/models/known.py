"""The architectures of our presets, without a model."""

from __future__ import annotations

import torch

from overlap_bench.engines.sglang_base.folder import ARCHITECTURES

EntryClass = [type(name, (torch.nn.Module,), {}) for name in ARCHITECTURES.values()]  # SGLang's name for it
