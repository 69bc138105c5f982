"""The card that SGLang's own host code runs against: engines/paced/device.py's, in CUDA's place."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from overlap_bench.engines.paced.device import Device, take_cuda


def take_place(card: Device) -> None:
    """What SGLang finds as the device's module is this card, whatever it calls its device."""
    take_cuda(card)
    torch.cuda.synchronize = lambda device=None: None
    torch.get_device_module = lambda device=None: torch.cuda
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"  # as Triton's driver says here
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    torch.cuda.stream = torch.cuda.StreamContext = lambda stream: stream  # entered again and again


class OnHost(TorchFunctionMode):  # type: ignore[misc]
    """Makes SGLang's buffers for the card in the host's memory, while it boots."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"
        return function(*given, **named)
