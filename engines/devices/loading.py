"""Build a module from its spec, wherever the device lives."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import cast

import torch

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.devices.base import Module, ModuleSpec


def build(spec: ModuleSpec, where: torch.device) -> Module:
    """The module of `spec` on `where`. What the build function raises comes out as it is.

    Built outside of inference_mode: an inference tensor could not be copied into by a thread that is outside
    of that mode, which every host thread is. Programs run under it.
    """
    path, function = spec.build.split(":")
    with torch.inference_mode(False), torch.no_grad():
        module = cast(Module, getattr(import_module(path), function)(where, **spec.arguments))
    for name, buffer in module.buffers.items():
        if not buffer.is_contiguous():  # other bytes than its own would be copied
            raise EngineError(f"buffer '{name}' is not contiguous")
    return module


def settle_garbage() -> None:
    """Take what is alive out of the collector's sight: it stays, and no later collection walks it again."""
    gc.collect()
    gc.freeze()


def one_line(error: BaseException) -> str:
    """An exception as one line for a person."""
    text = " ".join(str(error).split())
    if isinstance(error, EngineError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
