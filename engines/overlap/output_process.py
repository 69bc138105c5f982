"""The output process of `output=process`: `python -m engines.overlap.output_process CONFIG`.

Reads produced tokens from the engine, sends events straight to the harness. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
import zmq

from engines.host import Sink, die_with_parent
from engines.overlap.output import OutputProcessor, Produced
from engines.overlap.presets import load_tokenizer


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    inbox: str  # bound here (PULL); an empty message is the end
    events: str
    model: str
    vocabulary: int
    stream_interval: int
    parent: int = msgspec.field(default_factory=os.getpid)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(sys.argv[1], type=OutputConfig)
    die_with_parent(config.parent)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.rcvhwm = 0
    inbox.bind(config.inbox)
    sink = Sink(config.events, context)
    tokenizer = load_tokenizer(config.model, config.vocabulary)
    processor = OutputProcessor(tokenizer, config.stream_interval, sink)
    decode = msgspec.msgpack.Decoder(list[Produced]).decode
    print("ready", flush=True)
    while message := inbox.recv():
        processor.process(decode(message))
    context.destroy(linger=1000)


if __name__ == "__main__":
    main()
    os._exit(0)
