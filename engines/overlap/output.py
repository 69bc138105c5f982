"""What output processing is, wherever it runs: detokenize, build chunks, serialize, send.

The same code for every choice of the output toggle, so that the choices differ in place and time alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engines.api import Chunk, Event, EventSink, Finish


class Produced(msgspec.Struct, frozen=True, array_like=True):
    """One token of one request, and with its last one what ends it."""

    id: int
    token: int
    token_ns: int  # when it was on the host
    finish: Finish | None


@dataclass(slots=True)
class _Stream:
    """What was produced for one request and not sent yet."""

    decode: DecodeStream
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    text: str = ""
    started: bool = False


class OutputProcessor:
    """Turns produced tokens into events. A chunk holds `stream_interval` tokens, but a request's first token
    goes out alone and at once, and its last chunk holds what is left."""

    def __init__(self, tokenizer: Tokenizer, stream_interval: int, sink: EventSink) -> None:
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._sink = sink
        self._streams: dict[int, _Stream] = {}

    def process(self, produced: Sequence[Produced]) -> None:
        """The tokens of one step; sends at most one message."""
        events: list[Event] = []
        for each in produced:
            stream = self._streams.get(each.id)
            if stream is None:
                stream = self._streams[each.id] = _Stream(DecodeStream(skip_special_tokens=True))
            stream.token_ids.append(each.token)
            stream.token_ns.append(each.token_ns)
            stream.text += stream.decode.step(self._tokenizer, each.token) or ""
            if not stream.started or each.finish or len(stream.token_ids) >= self._interval:
                events.append(Chunk(each.id, stream.token_ids, stream.text, stream.token_ns))
                stream.token_ids, stream.token_ns, stream.text = [], [], ""
                stream.started = True
            if each.finish:
                events.append(each.finish)
                del self._streams[each.id]
        if events:
            self._sink.send(events)
