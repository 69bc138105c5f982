"""What a before arm can't show, measured apart: harness/calibration.json, by experiments/calibration.py."""

from __future__ import annotations

from importlib.resources import files

import msgspec
import numpy as np

from harness.machine import Machine


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A mean over boots and its standard error, us."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's device. Lists have one entry per batch size, ascending; in between it is interpolated,
    beyond the ends the end stands."""

    source: str
    device: str  # its kind
    machine: Machine
    batches: list[int]
    program_us: list[Measured]  # a program queued behind another
    turnaround_us: list[Measured]  # device idle between two queued steps
    rested_us: list[list[tuple[int, Measured]]]  # (device idle before it, longer than queued), ascending
    hand_over_us: list[Measured]  # giving a step's tokens to the output process
    aftermath_us: list[Measured]  # what a message of so many chunks costs the host after it was sent

    def turnaround(self, batch: float) -> Measured:
        return self._at(batch, self.turnaround_us)

    def hand_over(self, batch: float) -> Measured:
        return self._at(batch, self.hand_over_us)

    def aftermath(self, chunks: float) -> Measured:
        return self._at(chunks, self.aftermath_us)

    def rested(self, batch: float, idle_us: float) -> Measured:
        """How much longer a program takes on a device that stood still for so long, than queued: nothing at
        the turnaround, and beyond the longest pause what that one gave."""
        curves = []
        for row, points in enumerate(self.rested_us):
            idle = [self.turnaround_us[row].mean, *(each for each, _ in points)]
            longer = [Measured(0.0, 0.0), *(each for _, each in points)]
            curves.append(_interpolated(idle_us, idle, longer))
        return self._at(batch, curves)

    def _at(self, batch: float, values: list[Measured]) -> Measured:
        return _interpolated(batch, self.batches, values)


def _interpolated(at: float, places: list[int] | list[float], values: list[Measured]) -> Measured:
    return Measured(
        float(np.interp(at, places, [each.mean for each in values])),
        float(np.interp(at, places, [each.error for each in values])),
    )


def load() -> Calibration:
    """The stored one."""
    text = files("harness").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(text, type=Calibration)
