"""What a before arm can't show: calibration.json, made by experiments/validation/calibration.py."""

from __future__ import annotations

from importlib.resources import files

import msgspec
import numpy as np

from harness.common.machine import Machine


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A mean over blocks and its standard error, us."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}"


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's device, client and process boundary. Lists have one entry per batch size, ascending;
    between sizes it is interpolated, beyond either end the value of that end holds."""

    source: str
    device: str  # its kind
    machine: Machine
    batches: list[int]
    turnaround_us: list[Measured]  # device idle between two queued steps
    rested_us: list[Measured]  # how much longer a program takes on a device that stood still before it
    hand_over_us: list[Measured]  # giving a step's tokens to the output process
    aftermath_us: list[Measured]  # what a message of that many chunks costs the host after sending it

    def at(self, batch: float, values: list[Measured]) -> Measured:
        """One of the lists at a batch size."""
        mean, error = (
            float(np.interp(batch, self.batches, [getattr(each, part) for each in values]))
            for part in ("mean", "error")
        )
        return Measured(mean, error)


def load() -> Calibration:
    """The stored one."""
    text = files("harness.analysis").joinpath("calibration.json").read_bytes()
    return msgspec.json.decode(text, type=Calibration)
