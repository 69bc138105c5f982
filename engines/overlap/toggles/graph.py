"""graph: whether a decode step is one command or many.

Before (`off`): decode is launched eagerly, a command per kernel (emulated: leaf module). After (`on`): every
decode shape is captured at boot, and a step is one command. Prefill is always eager: its shapes are too many.

Claim: the setting of roseinfer's measurement, chosen to make host overheads visible; CUDA graphs are in every
engine since.

What can go wrong: a captured program reads the addresses it was captured with, so all it reads and writes
must be static; and everything is captured at boot, before the first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from overlap_bench.engines.api import Toggle

if TYPE_CHECKING:
    from overlap_bench.engines.devices.base import Device

TOGGLE = Toggle(
    name="graph",
    module=__name__,
    choices=("off", "on"),
    changes="whether decode is launched eagerly, or captured at boot and launched as one command",
    source="roseinfer (--cuda-graph)",
    counters=("captured_launches", "eager_launches", "kernel_commands"),
)
EAGER = ("off",)  # choices with which a card waits for the host between two kernels of a step


def launch_eagerly(device: Device, programs: Sequence[str], shapes: Iterable[tuple[int, int]]) -> None:
    """Before: nothing to prepare."""


def capture(device: Device, programs: Sequence[str], shapes: Iterable[tuple[int, int]]) -> None:
    """After. The largest first, so that the smaller ones fit into its memory pool."""
    for rows, blocks in sorted(shapes, reverse=True):
        for program in programs:
            device.capture(program, rows, blocks)


PREPARE = {"off": launch_eagerly, "on": capture}
