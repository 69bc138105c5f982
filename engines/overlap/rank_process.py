"""The host of one rank other than the first: `python -m overlap_bench.engines.overlap.rank_process CONFIG`.

It has a device of its own and the same programs on it. The first rank schedules; this one is told of each
step (toggle share) and launches it, as the first one does with its own. Its device reads back nothing: all
ranks choose the same tokens. What it has to say goes to its standard output.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from overlap_bench.engines.api import BadSetting, EngineError, EngineOptions
from overlap_bench.engines.overlap.toggles.share import RECEIVERS, Ends, Receiver
from overlap_bench.engines.processes import die_with_parent

DRAIN, BEGIN, COLLECT, STOP = "drain", "begin", "collect", "stop"  # orders
PROGRAM = 0  # a kind of device work (engines.devices.base)
LENGTH = struct.Struct("<I")  # in front of each answer: its bytes


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started with. `store`: where the ranks' devices meet."""

    options: EngineOptions
    toggles: dict[str, str]
    rank: int
    ranks: int
    store: str
    ends: Ends
    cores: str
    parent: int = msgspec.field(default_factory=os.getpid)


class Up(msgspec.Struct, frozen=True, tag="up"):
    """It can be told of steps. `device`: its device's process, where it has one."""

    device: int | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to an order."""

    what: str


class Broke(msgspec.Struct, frozen=True, tag="broke"):
    """Its last words."""

    message: str
    usage: bool


class Worked(msgspec.Struct, frozen=True, tag="worked"):
    """The programs of a round, as Device.work has them: all that it records, and sent between rounds only."""

    programs: bytes


FromRank = Up | Done | Worked | Broke


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to answer
    config = msgspec.json.decode(sys.argv[1], type=RankConfig)
    die_with_parent(config.parent)
    told = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed belongs to no answer

    def answer(said: FromRank) -> None:
        body = msgspec.msgpack.encode(said)
        os.write(told, LENGTH.pack(len(body)) + body)

    try:
        serve(config, RECEIVERS[config.toggles["share"]](config.ends), answer)
    except EngineError as error:
        answer(Broke(str(error), isinstance(error, BadSetting)))
    except Exception as error:
        answer(Broke(f"{type(error).__name__}: {error}", usage=False))


def serve(config: RankConfig, receiver: Receiver, answer: Callable[[FromRank], None]) -> None:
    """Boot, then do what comes, until told to stop."""
    from overlap_bench.engines.devices import open_device
    from overlap_bench.engines.overlap import device_plan
    from overlap_bench.engines.overlap.forward import Forward
    from overlap_bench.engines.overlap.plant import Plant
    from overlap_bench.engines.overlap.recorder import make_recorder
    from overlap_bench.engines.overlap.step import Step
    from overlap_bench.engines.overlap.toggles import d2h, gc, graph, h2d
    from overlap_bench.engines.tracing import listening, name_thread

    name_thread(f"rank {config.rank}")
    options, toggles = config.options, config.toggles
    model = device_plan.configure(options, toggles)
    chaos = None if options.chaos is None else options.chaos + config.rank
    device = open_device(
        options.device,
        staging=options.staging,
        pace=options.pace,
        chaos=chaos,
        cores=config.cores,
        blocking_sync=options.blocking_sync,
        place=(config.rank, config.ranks),
    )
    try:
        device.load(device_plan.module(model, (config.rank, config.ranks, config.store)))
        graph.PREPARE[toggles["graph"]](device, model.decode_programs, model.decode_shapes)
        counters: Counter[str] = Counter()
        forward_stream = device.stream("forward")
        metadata = device_plan.metadata(model, device)
        host_to_device = h2d.CHOICES[toggles["h2d"]](device, forward_stream, metadata, counters, lambda: None)
        ids = d2h.DeviceToHost()  # nobody asks for them
        ids.stream = forward_stream
        nothing_planted = Plant(None, 0, device, forward_stream, counters)
        recorder = make_recorder(listening())
        forward = Forward(device, host_to_device, ids, recorder, chaos, nothing_planted)
        answer(Up(device.pid))
        with gc.SERVING[toggles["gc"]]():
            while True:
                told = receiver.receive()
                if told.batch is not None:
                    forward.run(Step(told.number, told.batch, host_to_device.stage(told.batch)))
                    receiver.done()
                    continue
                receiver.done()
                if told.order == STOP:
                    return
                device.drain()
                if told.order == COLLECT:
                    work = device.work()
                    answer(Worked(work[work[:, 0] == PROGRAM].tobytes()))
                    continue
                if told.order == BEGIN:
                    device.begin_round()
                answer(Done(told.order))
    finally:
        with suppress(EngineError):
            device.close()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # torch's farewell can hang
