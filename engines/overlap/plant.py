"""A known delay in each step, to see whether a measurement finds what was put there (`--inject-delay`).

On the `device`, a program that computes for so long runs on stream `forward` in front of the step's own. On
the `host`, the scheduler's thread computes for so long in each step, and holds the interpreter meanwhile, as
Python work does. Both arms have the hook, the before arm with a delay of nothing, so that the delay is all
that differs. What the delays really took is counted: `planted_device_ns`, `planted_host_ns`. A delay on the
device is one launch more in each step, and is counted as that too.

On an emulated device without a pace, a step gets longer by more than its delay: in a pause a core loses some
of what its caches hold (results/reference/proofs/boots.md).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch

from overlap_bench.engines.delay import spin
from overlap_bench.engines.devices.base import Device, Stream

PROGRAM = "delay"
TAG = 1 << 40  # added to the step of a delay's device work, which tells it from the step's own
CALIBRATION_CYCLES = 1_000_000  # half a ms: less than a process's time slice on the card
CALIBRATIONS = 500  # at most
NO_FASTER = 100  # calibrations in a row


@dataclass(slots=True)
class Plant:
    """The hook of one engine; `at` is "device", "host", or None where nothing is planted."""

    at: str | None
    ns: int
    device: Device
    stream: Stream
    counters: MutableMapping[str, int]

    def prepare(self) -> None:
        """At boot: from now on one command."""
        if self.at == "device":
            self.device.capture(PROGRAM, self.ns)

    def delay_device(self, step: int) -> None:
        """On the thread that launches, in front of the step's program."""
        if self.at == "device":
            self.device.launch(PROGRAM, self.ns, stream=self.stream, step=TAG + step)

    def delay_host(self) -> None:
        """On the scheduler's thread."""
        if self.at == "host":
            self.counters["planted_host_ns"] += spin(self.ns)

    def count_delays(self, work: np.ndarray) -> np.ndarray:
        """Device work of a round (Device.work), each delay as work of its step; what they took is counted."""
        if self.at == "device":
            delays = work[:, 1] >= TAG
            work[delays, 1] -= TAG
            self.counters["planted_device_ns"] = int((work[delays, 3] - work[delays, 2]).sum())
        return work


def delay_program(device: torch.device) -> Callable[[int], None]:
    """The program of a module on `device`: computes for so many nanoseconds, and for nothing."""
    return SpinKernel() if device.type == "cuda" else compute_for_nothing


def compute_for_nothing(ns: int) -> None:
    spin(ns)


class SpinKernel:
    """On CUDA, a kernel that counts clock cycles. How many there are in a nanosecond is measured at its first
    call, which is a warm-up and not captured; where the clock changes later, the counter shows it.

    The highest rate seen counts: a clock still ramping up, and the kernels of the other arm, which boots
    beside this one and time-shares the card with it, can only lower it.
    """

    def __init__(self) -> None:
        self._cycles_per_ns = 0.0

    def __call__(self, ns: int) -> None:
        if not self._cycles_per_ns:
            self._cycles_per_ns = self._measure()
        torch.cuda._sleep(round(ns * self._cycles_per_ns))

    def _measure(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        most, since = 0.0, 0
        for _ in range(CALIBRATIONS):
            start.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            end.record()
            end.synchronize()
            found = CALIBRATION_CYCLES / (start.elapsed_time(end) * 1e6)
            since = 0 if found > 1.01 * most else since + 1
            most = max(most, found)
            if since == NO_FASTER:
                break
        return most
