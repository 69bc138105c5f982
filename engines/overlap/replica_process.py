"""The second of two replicas: `python -m engines.overlap.replica_process CONFIG`.

An engine like the first, with a device of its own. Its requests come from the first one, its events go to the
harness; it steps when the first one does (replicas.py).
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec
import zmq

from engines.api import BadSetting, Cancel, EngineError, Submit
from engines.host import Sink
from engines.overlap.replicas import Broke, Link, ReplicaConfig, Seat, Up
from engines.processes import die_with_parent
from engines.tracing import name_thread


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to answer
    config = msgspec.json.decode(sys.argv[1], type=ReplicaConfig)
    die_with_parent(config.parent)
    link = Link(socket.socket(fileno=config.link))
    try:
        serve(config, link)
    except EngineError as error:
        link.send(Broke(str(error), isinstance(error, BadSetting)))
    except Exception as error:
        link.send(Broke(f"{type(error).__name__}: {error}", usage=False))


def serve(config: ReplicaConfig, link: Link) -> None:
    """Boot, then serve what comes until the first one is gone."""
    from engines.devices import open_device
    from engines.overlap.engine import OverlapEngine

    name_thread("replica 1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0
    inbox.connect(config.inbox)
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(link.fileno(), zmq.POLLIN)
    decode = msgspec.msgpack.Decoder(Submit | Cancel).decode
    options, replicas = config.options, int(config.toggles["replicas"])
    device = open_device(
        options.device,
        staging=options.staging,
        pace=options.pace,
        chaos=options.chaos,
        cores=config.cores,
        blocking_sync=options.blocking_sync,
        place=(1, replicas),
    )
    try:
        seat = Seat(1, replicas, config.store, link)
        engine = OverlapEngine(options, config.toggles, device, seat)

        def pump(timeout: float | None) -> bool:
            if timeout != 0:
                poller.poll(None if timeout is None else int(timeout * 1e3))
            engine.obey()
            while True:
                try:
                    message = decode(inbox.recv(zmq.NOBLOCK))
                except zmq.Again:
                    return not link.closed
                if isinstance(message, Submit):
                    engine.submit(message.request)
                else:
                    engine.cancel(message.id)

        try:
            engine.start(Sink(config.events, context))
            link.send(Up(device.pid))
            engine.run(pump)
        finally:
            engine.stop()
    finally:
        device.close()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # torch's farewell can hang
