"""What a before arm can't show of its device and of a process border, for harness/prediction.py.

    python -m experiments.calibration

The engine's own programs and copies without its loop: tiny-gpt2, fp32, one decode step of batch 1, 8 and 32
over and over, in windows that take turns, in fresh boots. A step is either queued behind the one before it,
as overlap does, or launched only after that one's ids are on the host and the host has computed for a while:

- `turnaround`: device idle between two queued steps;
- `rested`: how much longer a program takes on a device that stood still for so long before it, than queued;
- `hand_over`: one call that gives the tokens of a step to the output process;
- `aftermath`: what a message to a client (one chunk of one token for each request) costs the host behind the
  call that sends it: its sending thread and the client wake, and take the core from a fixed piece of work.

Besides the table, this writes harness/calibration.json, which is what predictions use.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter_ns

import msgspec
import numpy as np
import zmq

import harness
from engines import api
from engines.host import Sink
from engines.overlap import SPEC
from engines.overlap.engine import OverlapEngine
from engines.overlap.output import Produced
from engines.overlap.plant import compute_for
from engines.overlap.step import Step
from experiments.record import write_result
from harness.calibration import Calibration, Measured
from harness.load import ask_for_short_slice
from harness.machine import fingerprint
from tests.serving import Pulled

SETTINGS = {
    "schedule": "serial",
    "launch": "inline",
    "h2d": "pinned",
    "d2h": "event",
    "output": "process",
    "graph": "on",
}
BATCHES = {1: 120, 8: 80, 32: 40}  # steps of a window
QUEUED, WORK, MESSAGE = "queued", "work", "message"  # how a step follows the one before it; or a pause
PAUSES_US = (0, 100, 200, 400, 800)
HOST_ROUNDS = 2500  # of the fixed work: about what the host has to do between output and launch
KINDS: tuple[str | int, ...] = (QUEUED, WORK, MESSAGE, *PAUSES_US)
WINDOWS = 6  # of each kind, in turn
BOOTS = 4
CONTEXT = 40  # tokens of each request: the middle of the default workload


class Bench:
    """One boot: a decode step of so many requests that can be run again and again."""

    def __init__(self, engine: OverlapEngine, client: Sink, requests: int, first: int) -> None:
        assert engine._run is not None
        assert engine._device is not None
        self.run, self.device, self.client = engine._run, engine._device, client
        for number in range(requests):
            engine.submit(api.Request(first + number, list(range(5, 5 + CONTEXT)), 8))
        prefill = self.run.schedule()
        assert prefill is not None
        self.run.launch.submit(prefill)
        self.run.scheduler.append(prefill.batch, self.run.copy_done(prefill), frozenset())
        decode = self.run.scheduler.schedule()
        assert decode is not None
        self.batch = decode

    def end(self) -> None:
        self.run.scheduler.append(self.batch, [0] * self.batch.rows, frozenset())
        for active in self.batch.requests:
            self.run.end(active.request.id, "cancelled")

    def launch(self) -> Step:
        number = self.run.next_step
        self.run.next_step += 1
        step = Step(number, self.batch, self.run.h2d.stage(self.batch))
        self.run.launch.submit(step)
        return step

    def window(self, kind: str | int, steps: int) -> tuple[float, float, float]:
        """(program, device idle in front of it, hand-over or message), means of a window in us."""
        first, giving = self.run.next_step, 0
        produced = [Produced(each.request.id, 7, 0, None) for each in self.batch.requests]
        chunks = [api.Chunk(each.request.id, [7], " word", [0]) for each in self.batch.requests]
        give: Callable[[], None] = {
            WORK: lambda: None,
            MESSAGE: lambda: self.client.send(chunks),
        }.get(kind, lambda: self.run.output.hand_over(produced))  # type: ignore[call-overload]
        previous: Step | None = None
        for _ in range(steps):
            if previous is not None and kind != QUEUED:
                self.run.copy_done(previous)
                began = perf_counter_ns()
                give()
                giving += perf_counter_ns() - began
                if isinstance(kind, int):
                    compute_for(1000 * kind)
                else:
                    compute_fixed()
            step = self.launch()
            if previous is not None and kind == QUEUED:
                self.run.copy_done(previous)
            previous = step
        assert previous is not None
        self.run.copy_done(previous)
        work = self.device.work()
        programs = work[(work[:, 0] == 0) & (work[:, 1] > first + 1)]
        programs = programs[np.argsort(programs[:, 2])]
        spent = (programs[:, 3] - programs[:, 2]) / 1e3
        idle = (programs[1:, 2] - programs[:-1, 3]) / 1e3
        return float(spent.mean()), float(idle.mean()), giving / (steps - 1) / 1e3


def compute_fixed() -> None:
    """The same amount of work each time, however often it is interrupted."""
    table: dict[int, int] = {}
    for number in range(HOST_ROUNDS):
        table[number & 63] = number


def receive(address: str) -> None:
    """A client process: takes in messages as the load generator does."""
    ask_for_short_slice()
    socket = zmq.Context().socket(zmq.PULL)
    socket.bind(address)
    decode = msgspec.msgpack.Decoder(list[api.Event]).decode
    while decode(socket.recv()):
        pass


def one_boot() -> dict[tuple[int, str | int], tuple[float, float, float]]:
    """(batch, how a step follows the one before it) → medians over the windows."""
    sink = Pulled()
    address = f"ipc:///tmp/calibration-{os.getpid()}"
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(address,))
    receiver.start()
    client = Sink(address, zmq.Context())
    engine = OverlapEngine(api.EngineOptions(device="emulated"), SPEC.check(SETTINGS))
    engine.start(sink)
    found: dict[tuple[int, str | int], list[tuple[float, float, float]]] = defaultdict(list)
    try:
        first = 0
        for batch, steps in BATCHES.items():
            bench = Bench(engine, client, batch, first)
            for window in range(WINDOWS + 1):
                for kind in KINDS:
                    bench.device.begin_round()
                    values = bench.window(kind, steps)
                    sink.pull(wait=False)
                    if window:  # the first one warms up
                        found[batch, kind].append(values)
            bench.end()
            first += batch
    finally:
        engine.stop()
        sink.close()
        client.send([])  # its end
        receiver.join(10)
    return {key: tuple(median(part) for part in zip(*values, strict=True)) for key, values in found.items()}


def aftermath(boot: dict[tuple[int, str | int], tuple[float, float, float]], batch: int) -> float:
    """How much longer the device waits for a step behind a message, sending it apart."""
    message, work = boot[batch, MESSAGE], boot[batch, WORK]
    return message[1] - message[2] - (work[1] - work[2])


def measured(values: list[float]) -> Measured:
    """Mean over boots, and its standard error."""
    return Measured(round(fmean(values), 2), round(stdev(values) / len(values) ** 0.5, 2))


def main() -> None:
    boots = [one_boot() for _ in range(BOOTS)]
    sizes = list(BATCHES)
    rested = [
        [
            (
                round(fmean(boot[batch, pause][1] for boot in boots)),
                measured([boot[batch, pause][0] - boot[batch, QUEUED][0] for boot in boots]),
            )
            for pause in PAUSES_US
        ]
        for batch in sizes
    ]
    calibration = Calibration(
        source="experiments/calibration.py",
        device="emulated",
        machine=fingerprint(),
        batches=sizes,
        program_us=[measured([boot[batch, QUEUED][0] for boot in boots]) for batch in sizes],
        turnaround_us=[measured([boot[batch, QUEUED][1] for boot in boots]) for batch in sizes],
        rested_us=rested,
        hand_over_us=[measured([boot[batch, 200][2] for boot in boots]) for batch in sizes],
        aftermath_us=[measured([aftermath(boot, batch) for boot in boots]) for batch in sizes],
    )
    path = Path(harness.__file__).with_name("calibration.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    write_result(
        "calibration",
        title="Device and process border without the loop, us; mean of four boots and its standard error",
        header=[
            "batch",
            "program, queued",
            "turnaround",
            "longer after an idle of",
            "hand-over",
            "aftermath",
        ],
        rows=[
            [
                str(batch),
                str(calibration.program_us[row]),
                str(calibration.turnaround_us[row]),
                "; ".join(f"{idle}: {longer}" for idle, longer in rested[row]),
                str(calibration.hand_over_us[row]),
                str(calibration.aftermath_us[row]),
            ]
            for row, batch in enumerate(sizes)
        ],
        data=[{f"{batch}, {kind}": values for (batch, kind), values in boot.items()} for boot in boots],
    )


if __name__ == "__main__":
    main()
