"""What output processing is, wherever it runs: detokenize, find stop strings, build chunks, serialize, send.

The same code for every choice of the output toggle, so that the choices differ in place and time alone. A
stop string is found here, where the text is, so the engine may be tokens ahead by then: what it hands over
past the stop is dropped and never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from overlap_bench.engines.api import Chunk, Event, EventSink, Finish


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """A request with stop strings begins. `finish` is what to send when its text reaches one, except for
    its number of tokens."""

    stop: list[str]
    finish: Finish


class Produced(msgspec.Struct, frozen=True, array_like=True):
    """One token of one request; with the last one, the request's end."""

    id: int
    token: int
    token_ns: int  # when it was on the host
    finish: Finish | None


class Stopped(msgspec.Struct, frozen=True, array_like=True):
    """Reported back to the engine: a request's text has just reached a stop string (`dropped` 0), or that
    many tokens past it were dropped, by which time its id may be another request's."""

    id: int
    dropped: int


@dataclass(slots=True)
class _Stream:
    """What was produced for one request and not sent yet."""

    decode: DecodeStream = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    undecoded: list[int] = field(default_factory=list)  # ids that are not text yet: half a character
    token_ids: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    text: str = ""
    started: bool = False
    opening: Opening | None = None
    completion_tokens: int = 0  # counted where there is an opening
    stopped: bool = False


class OutputProcessor:
    """Turns produced tokens into events. A chunk holds `stream_interval` tokens, but a request's first token
    goes out alone and at once, and its last chunk holds what is left.

    Text that may be the beginning of a stop string is held back until more is known; its tokens are not.
    `tell` is called before the events that it is about are sent: whoever hears of the end may send the
    engine something new at once, and it must know of the end by then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream_interval: int,
        sink: EventSink,
        tell: Callable[[list[Stopped]], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._interval = stream_interval
        self._sink = sink
        self._tell = tell
        self._streams: dict[int, _Stream] = {}

    def open(self, opening: Opening) -> None:
        """Before the first token of a request that has stop strings."""
        self._streams[opening.finish.id] = _Stream(opening=opening)

    def process(self, produced: Sequence[Produced]) -> None:
        """The tokens of one step; sends at most one message."""
        events: list[Event] = []
        stopped: list[Stopped] = []
        for each in produced:
            stream = self._streams.get(each.id)
            if stream is None:
                stream = self._streams[each.id] = _Stream()
            if stream.stopped:
                stopped.append(Stopped(each.id, dropped=1))
                if each.finish:
                    del self._streams[each.id]
                continue
            stream.token_ids.append(each.token)
            stream.token_ns.append(each.token_ns)
            stream.text += self._decoded(stream, each.token)
            finish = each.finish
            if finish:
                stream.text += self._rest(stream)
            if stream.opening is not None:
                finish = _at_stop(stream, stream.opening) or finish
            if not stream.started or finish or len(stream.token_ids) >= self._interval:
                events.append(_chunk(each.id, stream, last=finish is not None))
            if finish:
                events.append(finish)
                if each.finish:
                    del self._streams[each.id]
                else:  # the engine goes on until it hears of this; then it closes the request
                    stream.stopped = True
                    stopped.append(Stopped(each.id, dropped=0))
        if stopped:
            self._tell(stopped)
        if events:
            self._sink.send(events)

    def close(self, request: int) -> None:
        """The engine has ended a request whose text came to a stop string."""
        self._streams.pop(request, None)

    def _decoded(self, stream: _Stream, token: int) -> str:
        """The text that is whole with this token; "" where it ends inside of a character."""
        lost = ""
        try:
            text = stream.decode.step(self._tokenizer, token)
        except Exception as error:  # the library raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            # A later token changed how earlier ones decode, which some decoders do to bytes that are no
            # character (vLLM 17448). What was sent stands, half a character stays one; start a new stream.
            lost = self._rest(stream)
            stream.decode = DecodeStream(skip_special_tokens=True)
            text = stream.decode.step(self._tokenizer, token)
        if text is None:
            stream.undecoded.append(token)
            return lost
        stream.undecoded.clear()
        return lost + text

    def _rest(self, stream: _Stream) -> str:
        """What the last ids come to, which no further token will complete."""
        rest: str = self._tokenizer.decode(stream.undecoded) if stream.undecoded else ""
        stream.undecoded.clear()
        return rest


def _at_stop(stream: _Stream, opening: Opening) -> Finish | None:
    """What ends a request whose text has just reached a stop string; the text is cut before it. Text that
    was sent never ended in the beginning of one, so the stop string lies wholly in unsent text."""
    stream.completion_tokens += 1
    found = [at for stop in opening.stop if (at := stream.text.find(stop)) >= 0]
    if not found:
        return None
    stream.text = stream.text[: min(found)]
    return msgspec.structs.replace(opening.finish, completion_tokens=stream.completion_tokens)


def _chunk(request: int, stream: _Stream, last: bool) -> Chunk:
    """Everything unsent, except for text that waits for what comes behind it."""
    held = 0 if last or stream.opening is None else held_back(stream.text, stream.opening.stop)
    sent = len(stream.text) - held
    chunk = Chunk(request, stream.token_ids, stream.text[:sent], stream.token_ns)
    stream.token_ids, stream.token_ns, stream.text = [], [], stream.text[sent:]
    stream.started = True
    return chunk


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
