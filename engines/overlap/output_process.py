"""The output process of `output=process`: `python -m overlap_bench.engines.overlap.output_process CONFIG`.

Reads what the engine hands over from its standard input, sends events straight to the harness, and tells the
engine of stop strings on its standard output. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import struct
import sys

import msgspec
import zmq

from overlap_bench.engines.api import PHASES, HostRanges
from overlap_bench.engines.delay import spin
from overlap_bench.engines.host import Sink
from overlap_bench.engines.output import Opening, OutputProcessor, Produced, Stopped
from overlap_bench.engines.overlap.recorder import OUTPUT
from overlap_bench.engines.presets import load_tokenizer
from overlap_bench.engines.processes import die_with_parent
from overlap_bench.engines.tracing import RangeLog, name_thread

LENGTH = struct.Struct("<I")  # in front of each message: its bytes
NICE = 10


class ToOutput(msgspec.Struct, frozen=True, array_like=True):
    """What the engine hands over at once; it is processed in this order."""

    opened: list[Opening] = []
    step: int = -1  # the one that `produced` belongs to
    produced: list[Produced] = []
    closed: list[int] = []  # requests
    ranges: str = ""  # KEEP: record them from now on; TELL: send what was recorded
    flush: bool = False  # say when all of it is sent
    delay_ns: int = -1  # of each step from now on (Engine.delay)


KEEP, TELL = "keep", "tell"


class FromOutput(msgspec.Struct, frozen=True, array_like=True):
    """What the engine is told: of stop strings; without any it is an answer: to TELL with ranges, to `flush`
    that everything is sent, to `delay_ns` with what delays took since the last one."""

    stopped: list[Stopped] = []
    ranges: HostRanges | None = None
    delayed_ns: int = 0


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    events: str
    model: str
    vocabulary: int
    stream_interval: int
    parent: int = msgspec.field(default_factory=os.getpid)


def stay_behind_the_step() -> None:
    """Where cores are few, this process shares one with the engine: it must run in what the step leaves
    over, not preempt it each time it is handed something."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.nice(NICE)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.argv[1], type=OutputConfig)
    die_with_parent(config.parent)
    stay_behind_the_step()
    name_thread("output")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sink = Sink(config.events, context)
    tokenizer = load_tokenizer(config.model, config.vocabulary)
    encode = msgspec.msgpack.Encoder().encode

    def tell(told: FromOutput) -> None:
        body = encode(told)
        sys.stdout.buffer.write(LENGTH.pack(len(body)) + body)
        sys.stdout.buffer.flush()

    processor = OutputProcessor(
        tokenizer, config.stream_interval, sink, lambda stopped: tell(FromOutput(stopped))
    )
    ranges = RangeLog("output process", PHASES)
    delay_ns = delayed_ns = 0
    decode = msgspec.msgpack.Decoder(ToOutput).decode
    handed_over = sys.stdin.buffer
    print("ready", flush=True)
    while header := handed_over.read(LENGTH.size):
        handed = decode(handed_over.read(*LENGTH.unpack(header)))
        for opening in handed.opened:
            processor.open(opening)
        if handed.produced:
            began = ranges.begin(OUTPUT, handed.step)
            processor.process(handed.produced)
            if delay_ns:
                delayed_ns += spin(delay_ns)
            ranges.end(OUTPUT, handed.step, began)
        for request in handed.closed:
            processor.close(request)
        if handed.ranges == KEEP:
            ranges.keep()
        elif handed.ranges == TELL:
            tell(FromOutput(ranges=ranges.take("output", "output")))
        if handed.flush:
            tell(FromOutput())
        if handed.delay_ns >= 0:
            tell(FromOutput(delayed_ns=delayed_ns))
            delay_ns, delayed_ns = handed.delay_ns, 0
    context.destroy(linger=1000)


if __name__ == "__main__":
    main()
    os._exit(0)
