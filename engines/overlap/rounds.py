"""What is recorded of a round, and what is delayed in it."""

from __future__ import annotations

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.devices.base import Device
from overlap_bench.engines.overlap.forward import Forward
from overlap_bench.engines.overlap.loop import Loop
from overlap_bench.engines.overlap.ranks import OtherRanks
from overlap_bench.engines.overlap.recorder import Tracer
from overlap_bench.engines.overlap.toggles import gc
from overlap_bench.engines.overlap.tokenizing import Tokenizing


class Rounds(api.Engine):
    """All of an engine but its requests: what it is told between two rounds, or two steps."""

    _loop: Loop
    _forward: Forward
    _device: Device
    _tokenizing: Tokenizing | None = None  # where texts are tokenized by threads of their own
    _ranks: OtherRanks | None = None  # where the model spans several devices
    _tracer: Tracer | None = None  # in a round that is profiled
    _delayed = False  # in a round with delays

    def begin_round(self) -> None:
        loop = self._loop
        self._forget()
        self._tracer, self._delayed = None, False
        if self._tokenizing is not None:
            self._tokenizing.begin_round()
        loop.recorder.begin_round(loop.next_step)

    def begin_profile(self, steps: int) -> None:
        loop = self._loop
        self._forget()
        self._tracer = loop.recorder if isinstance(loop.recorder, Tracer) else Tracer()
        loop.recorder = self._forward.recorder = self._tracer
        loop.output.keep_ranges()
        self._tracer.begin_profile(loop.next_step, steps)

    def _forget(self) -> None:
        """What the device and the counters hold of earlier rounds."""
        loop = self._loop
        loop.settle()
        self._drain_devices()
        self._device.begin_round()
        if self._ranks is not None:
            self._ranks.begin_round()
        loop.counters.clear()
        loop.counters.update(dict.fromkeys(gc.TOGGLE.counters, 0))  # zero is a finding too

    def drain(self) -> None:
        self._loop.drain()
        self._drain_devices()

    def _drain_devices(self) -> None:
        self._device.drain()
        if self._ranks is not None:
            self._ranks.drain()

    def delay(self, phase: str, ns: int) -> int:
        loop = self._loop
        if not self._delayed:
            self._delayed = True
            loop.output.keep_ranges()
        spent = loop.recorder.delay.put(phase if phase in api.PHASES else "", ns)
        spent += loop.output.delay(ns if phase == "output-process" else 0)
        if self._tokenizing is not None:
            spent += self._tokenizing.delay(ns if phase == "tokenize" else 0)
        return spent

    def collect(self) -> api.RoundRecord:
        loop, device = self._loop, self._device
        loop.settle()
        work = loop.plant.count_delays(device.work())
        return api.RoundRecord(
            steps=loop.recorder.table(),
            device_work=api.DeviceWork(len(work), work.tobytes()),
            other_ranks=[] if self._ranks is None else self._ranks.work(),
            counters=dict(loop.counters) | {"steps_lost": loop.recorder.lost} | device.counters,
            memory=device.memory(),
            profile=self._profile(),
            beside=self._beside() if self._delayed else [],
        )

    def _beside(self) -> list[api.HostRanges]:
        """What other threads and processes did in a round with delays."""
        tokenizing = [] if self._tokenizing is None else [self._tokenizing.take_ranges()]
        output = [
            msgspec.structs.replace(each, names=["output-process"] * len(each.names))
            for each in self._loop.output.take_ranges()
        ]
        return [*output, *tokenizing]

    def _profile(self) -> api.Profile | None:
        if self._tracer is None:
            return None
        loop = self._loop
        return api.Profile(
            opened_ns=self._tracer.window.opened_ns,
            closed_ns=self._tracer.window.closed_ns,
            hosts=[self._tracer.end_profile(), *loop.output.take_ranges()],
            streams={"program": "forward", "h2d": "forward", "d2h": loop.d2h.stream.name},
        )
