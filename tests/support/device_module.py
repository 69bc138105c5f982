"""A small module for the device tests; built where the device lives."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.pace import Size

ROWS = 256


class _Net(torch.nn.Module):
    """Three leaf modules, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.act = torch.nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(self.act(self.first(x))))


class DeviceModule:
    """`a`, `b`: int64 [256]; `x`, `y`: float32 [4, 8]; `big`: 2 MiB."""

    def __init__(self, where: torch.device, gates: str, tag: int) -> None:
        torch.manual_seed(tag)
        self.root = _Net().to(where).eval()
        self.a = torch.zeros(ROWS, dtype=torch.int64, device=where)
        self.b = torch.zeros(ROWS, dtype=torch.int64, device=where)
        self.x = torch.randn(4, 8).to(where)
        self.y = torch.zeros(4, 8, device=where)
        self.buffers = {
            "a": self.a,
            "b": self.b,
            "x": self.x,
            "y": self.y,
            "big": torch.zeros(2 << 20, dtype=torch.uint8, device=where),
        }
        self.programs = {
            "add": self.add,
            "double": self.double,
            "copy": self.copy,
            "net": self.net,
            "slow": self.slow,
            "hold": self.hold,
            "held_net": self.held_net,
            "fail": self.fail,
            "sum5": self.sum5,
        }
        self.facts: dict[str, Any] = {"tag": tag, "leaf_calls": 4}
        self._gates = Path(gates)

    def sizes(self, program: str, *arguments: int) -> Sequence[Size]:
        """`add` and `slow` are decodes of as many rows as they are given, `net` is a prefill of 4 tokens."""
        match program, arguments:
            case (("add" | "slow"), (rows,)):
                return [Size("decode", rows, rows, 0)]
            case "net", ():
                return [Size("prefill", 1, 4, 4)]
        return []

    def add(self, amount: int) -> None:
        self.a += amount

    def double(self) -> None:
        self.a *= 2

    def copy(self) -> None:
        self.b.copy_(self.a)

    def sum5(self, a: int, b: int, c: int, d: int, e: int) -> None:
        self.a += 10_000 * a + 1000 * b + 100 * c + 10 * d + e

    def net(self) -> None:
        self.y.copy_(self.root(self.x))

    def slow(self, milliseconds: int) -> None:
        if self.a.is_cuda:
            torch.cuda._sleep(milliseconds * 1_000_000)
        else:
            time.sleep(milliseconds / 1000)

    def hold(self, gate: int) -> None:
        """Runs until the host opens the gate of that number. Emulated device only."""
        while not (self._gates / str(gate)).exists():
            time.sleep(0.001)

    def held_net(self, gate: int) -> None:
        self.hold(gate)
        self.net()

    def fail(self) -> None:
        raise ValueError("the program\nis broken")


def build(where: torch.device, gates: str = "/nowhere", tag: int = 0) -> DeviceModule:
    return DeviceModule(where, gates, tag)


def build_badly(where: torch.device) -> DeviceModule:
    raise RuntimeError("no weights\nto be found")


def build_wrongly_asked(where: torch.device) -> DeviceModule:
    raise BadSetting("unknown model 'gtp2'")
