"""With this folder and the checkout on PYTHONPATH, a process and all that it starts find a CUDA card: the
stand-in of tests/support/cuda_stand_in.py. So the GPU's own commands run from end to end, in real processes:

    PYTHONPATH=tests/support/card:. python -m experiments.gpu.reference facts --model micro-gpt2:float32

Python imports a module of this name before all others. What a card does, and when, it does not tell.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

DEVICE = "engines.devices.cuda"  # the one module that makes a torch.device of the card


class _Loader(importlib.abc.Loader):
    """A module's own loader, and the stand-in when the module is there."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        from tests.support.cuda_stand_in import stand_in_everywhere  # imports torch, which is there now

        card = stand_in_everywhere()
        if module.__name__ == DEVICE:
            module.torch = card  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("torch", DEVICE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
