"""What one step asks of the device, in order. Runs on the thread that launches, and on no other."""

from __future__ import annotations

import random
import time

from overlap_bench.engines.devices.base import Device, Event
from overlap_bench.engines.overlap.plant import Plant
from overlap_bench.engines.overlap.recorder import H2D, LAUNCH, Recorder
from overlap_bench.engines.overlap.step import Step
from overlap_bench.engines.overlap.toggles.d2h import DeviceToHost
from overlap_bench.engines.overlap.toggles.h2d import HostToDevice

CHAOS_MOST_S = (0.0, 0.002, 0.02)  # none, within a step, and far beyond one: the scheduler runs ahead


class Forward:
    """Metadata, program and future map go on stream `forward`, the sampled ids on `d2h.stream`."""

    def __init__(
        self,
        device: Device,
        h2d: HostToDevice,
        d2h: DeviceToHost,
        recorder: Recorder,
        chaos: int | None,
        plant: Plant,
    ) -> None:
        self.device = device
        self.h2d = h2d
        self.d2h = d2h
        self.recorder = recorder
        self.plant = plant
        self.stream = device.stream("forward")
        self._chaos = random.Random(chaos) if chaos is not None else None
        self._last_copy_done: Event | None = None

    def run(self, step: Step) -> None:
        """Issue everything the step needs. It can block in three places: in a choice of h2d (a pageable copy,
        a tensor that is pinned for the first time), in the first launch of a program that is not captured,
        and where the launch queue is full."""
        record, device = self.recorder, self.device
        if self._chaos is not None:
            time.sleep(self._chaos.random() * self._chaos.choice(CHAOS_MOST_S))

        began = record.begin(H2D, step.number)
        self.h2d.copy(step)
        record.end(H2D, step.number, began)

        began = record.begin(LAUNCH, step.number)
        self.fence()
        self.plant.delay_device(step.number)
        program = step.batch.program
        device.launch(program.name, *program.arguments, stream=self.stream, step=step.number)
        step.launch_done.set()
        self.d2h.start(step)
        record.end(LAUNCH, step.number, began)
        self._last_copy_done = step.copy_done

    def fence(self) -> None:
        """Write after read: the program overwrites `sampled_ids`, which the copy of the step before may
        still be reading on the other stream. Without it that step's ids would be this step's."""
        if self._last_copy_done is not None:
            self.device.wait(self.stream, self._last_copy_done)
