"""Packages that SGLang imports and no step of ours comes to: empty modules stand in for them.

Once `seal` was called, whatever touches one ends the round: nothing of a step can be theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from overlap_bench.engines.api import EngineError

_sealed: list[bool] = []


def seal() -> None:
    """Make each stand-in raise from now on, whoever uses it."""
    _sealed.append(True)


def touched(name: str) -> None:
    if _sealed:
        raise EngineError(f"SGLang came to {name} in a step, for which an empty module stands in here")


class _Kind(type):
    """The class of stand-ins, which are classes: some are inherited from, some decorate."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *given: Any, **named: Any) -> Any:
        touched(f"{cls.__module__}.{cls.__qualname__}")
        return super().__call__()


class _StandIn(metaclass=_Kind):
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Give back what was decorated."""
        touched(f"what {type(self).__module__}.{type(self).__qualname__} gave")
        return given[0] if given else None


def stand_in(module: str, name: str) -> Any:
    touched(f"{module}.{name}")
    return _Kind(name, (_StandIn,), {"__module__": module})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(self.__name__, name)


class Finder(MetaPathFinder, Loader):
    """Finds packages of these names, and all that they may contain."""

    def __init__(self, absent: Collection[str]) -> None:
        self.absent = absent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in self.absent:
            return None
        touched(name)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_without(absent: Collection[str]) -> None:
    """Put them in place, before SGLang is imported. Transformers looks for some itself: it comes first."""
    import torch
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401
    import triton.runtime.cache as cache

    # Compiled for a card it is one kernel; here there is nothing to compile for.
    torch.compile = lambda function=None, **named: function or (lambda each: each)
    for name in ("default_cache_dir", "default_dump_dir", "default_override_dir"):
        if not hasattr(cache, name):  # Triton's since 3.2: SGLang's own cache manager takes them, unused here
            setattr(cache, name, None)
    sys.meta_path.insert(0, Finder(absent))
