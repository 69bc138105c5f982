"""With this folder and the checkout on PYTHONPATH, a process and all that it starts find a CUDA card: the
stand-in of tests/support/cuda_stand_in.py. So the GPU's own commands run from end to end, in real processes:

    PYTHONPATH=tests/support/card:. python -m experiments.gpu.reference facts --model micro-gpt2:float32

Python imports a module of this name before all others. What a card does, and when, it does not tell.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

DEVICE = "overlap_bench.engines.devices.cuda"  # the one module that makes a torch.device of the card


class _Loader(SourceFileLoader):
    """Puts the stand-in into a module as soon as it is there."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        from tests.support.cuda_stand_in import stand_in_everywhere  # imports torch, which is there now

        card = stand_in_everywhere()
        if module.__name__ == DEVICE:
            vars(module)["torch"] = card


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("torch", DEVICE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
