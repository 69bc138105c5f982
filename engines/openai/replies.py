"""From what was read of a reply to the events of the engine protocol: chunks with tokens and stamps, and an
end. Pure: nothing here is done while anything waits to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from engines import api
from engines.openai import events

DONE = b"[DONE]"
STREAM = "text/event-stream"
BROKEN_OFF = ("abort", "error")  # finish reasons: SGLang's and vLLM's of a request that they gave up
SHOWN = 200  # characters of what a server said of an error

Tokens = Callable[[str], int]  # how many a text has


@dataclass(slots=True)
class Reply:
    """One request, and what came back for it: pieces of the body as they were read, each with the arrival of
    its last byte (-1 where the kernel does not say) and its reading.

    `whole`: the HTTP message came to its end. `failure`: what went wrong below that.
    """

    request: int
    accepted_ns: int
    prompt_tokens: int = -1  # where they are known without asking
    sent_ns: int = -1
    submitted_ns: int = -1
    status: int = 0
    content_type: str = ""
    pieces: list[bytes] = field(default_factory=list)
    arrived_ns: list[int] = field(default_factory=list)
    read_ns: list[int] = field(default_factory=list)
    whole: bool = False
    failure: str = ""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is sent on for a reply, and how the tokens of its chunks were counted: by "ids", "logprobs",
    "usage", "tokenizer", or as one per chunk ("chunks"); "" where it failed. `places` tells which events of
    the stream the chunks are."""

    events: list[api.Event]
    counted_by: str = ""
    read_together: int = 0  # chunks that were read in one piece with the one before
    places: tuple[int, ...] = ()


# ---------------------------------------------------------------------------------------------------------
# What is looked at of the JSON of a chunk


class _LogProbs(msgspec.Struct):
    tokens: list[str] | None = None  # of a completion
    content: list[msgspec.Raw] | None = None  # of a chat


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Part(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""
    message: Any = None


_decode = msgspec.json.Decoder(_Part).decode


@dataclass(slots=True)
class _Piece:
    """One chunk that holds a token: which event it is, the index of the piece that completed it, and what it
    said of itself."""

    place: int
    index: int
    text: str
    ids: list[int] | None
    logprobs: int | None  # how many
    completed: int | None  # usage so far


class _Wrong(Exception):
    """The reply is none; the message says why."""


# ---------------------------------------------------------------------------------------------------------


def outcome(reply: Reply, tokens: Tokens | None = None) -> Outcome:
    """All that there is to say of a reply that has ended. `tokens` counts those of a text, where a tokenizer
    is at hand."""
    try:
        return _served(reply, tokens)
    except _Wrong as wrong:
        return Outcome([api.Error(reply.request, str(wrong))])


def _served(reply: Reply, tokens: Tokens | None) -> Outcome:
    if reply.status and reply.status != 200:
        raise _Wrong(refusal(reply.status, b"".join(reply.pieces)))
    if reply.status and reply.content_type.partition(";")[0].strip().lower() != STREAM:
        raise _Wrong(f"the reply is not an event stream: its type is {reply.content_type or 'not given'}")
    pieces, usage, reason, done = _read(reply)
    if reply.cancelled:
        reason = "cancelled"
    elif reply.failure:
        raise _Wrong(reply.failure)
    elif not (reason or done):
        raise _Wrong("the stream ended too early: no finish reason, and no [DONE]")
    elif reason in BROKEN_OFF:
        raise _Wrong(f"the server broke off the reply: finish reason {reason}")
    counted_by, counts, total = _count(pieces, usage, tokens)
    if not (pieces or total or reply.cancelled):
        raise _Wrong("the reply has no token")
    chunks = _chunks(reply, pieces, counts)
    prompt = usage.prompt_tokens if usage is not None and usage.prompt_tokens else reply.prompt_tokens
    finish = api.Finish(
        reply.request,
        reason or "stop",
        prompt,
        total,
        reply.accepted_ns,
        -1,
        -1,
        sent_ns=reply.sent_ns,
        submitted_ns=reply.submitted_ns,
        arrived_ns=arrival(reply, len(reply.pieces) - 1) if reply.pieces else -1,
    )
    together = sum(
        reply.read_ns[first.index] == reply.read_ns[second.index] for first, second in pairwise(pieces)
    )
    return Outcome([*chunks, finish], counted_by, together, tuple(piece.place for piece in pieces))


def _read(reply: Reply) -> tuple[list[_Piece], _Usage | None, str, bool]:
    """Chunks that hold tokens, the last usage, the finish reason ("" for none), and whether [DONE] came.

    A token without a text (half a character, a special token) is a chunk like any other, where the chunk
    shows that there is one (_holds_token); the first chunk of a chat has a role, and shows none.
    """
    found, rest = events.split(reply.pieces)
    if reply.whole and (data := events.data_of(rest)) is not None:
        found.append((len(reply.pieces) - 1, data))  # some servers leave the last blank line out
    pieces: list[_Piece] = []
    usage, reason, so_far = None, "", None
    for number, (index, data) in enumerate(found):
        if data == DONE:
            return pieces, usage, reason, True
        try:
            part = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Wrong(f"chunk {number + 1} of the stream is malformed: {error}") from None
        if part.error is not None or part.object == "error":
            raise _Wrong(f"the server sent an error in the stream: {_message(part.error or part.message)}")
        usage = part.usage or usage
        for choice in part.choices:
            reason = choice.finish_reason or reason
            piece = _Piece(
                number, index, _text(choice), choice.token_ids, _logprobs(choice), _completed(part.usage)
            )
            if _holds_token(choice, piece, so_far):
                pieces.append(piece)
            so_far = so_far if piece.completed is None else piece.completed
    return pieces, usage, reason, False


def _holds_token(choice: _Choice, piece: _Piece, so_far: int | None) -> bool:
    """By its content; else by its usage, where that grows from chunk to chunk (`so_far`: the one before; a
    usage that comes only with the end is the sum). Without that, each chunk of a completion is a step, as
    vLLM's and SGLang's clients count them, except for one without text that brings the end."""
    if piece.text or piece.ids or piece.logprobs:
        return True
    if piece.ids is not None or piece.logprobs is not None:
        return False
    if piece.completed is not None and (so_far is not None or not choice.finish_reason):
        return piece.completed > (so_far or 0)
    return choice.text is not None and not choice.finish_reason


def _completed(usage: _Usage | None) -> int | None:
    return None if usage is None else usage.completion_tokens


def _text(choice: _Choice) -> str:
    """What a chunk says, a thought included."""
    if choice.delta is None:
        return choice.text or ""
    delta = choice.delta
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


def _logprobs(choice: _Choice) -> int | None:
    if choice.logprobs is None:
        return None
    listed = choice.logprobs.tokens if choice.logprobs.content is None else choice.logprobs.content
    return None if listed is None else len(listed)


def _count(
    pieces: Sequence[_Piece], usage: _Usage | None, tokens: Tokens | None
) -> tuple[str, list[int], int]:
    """How tokens were counted, those of each chunk (-1: the server tells only their sum), and all of them.

    The best that every chunk has: token ids, logprobs, a usage that grows from chunk to chunk, a tokenizer;
    then the usage at the end, which says what is in a chunk only where it equals the number of chunks. Where
    the server gives the sum, that is the sum.
    """
    total = usage.completion_tokens if usage is not None else None
    counts: list[int] | None = None
    if pieces and all(piece.ids for piece in pieces):
        counted_by, counts = "ids", [len(piece.ids or ()) for piece in pieces]
    elif pieces and all(piece.logprobs for piece in pieces):
        counted_by, counts = "logprobs", [piece.logprobs or 0 for piece in pieces]
    elif pieces and all(piece.completed for piece in pieces):
        so_far = [0, *(piece.completed or 0 for piece in pieces)]
        counted_by = "usage"
        counts = [after - before for before, after in pairwise(so_far)]
    elif tokens is not None:
        # Each by itself: a chunk ends where a token does, and encoding all at once would merge some tokens.
        counted_by, counts = "tokenizer", [tokens(piece.text) for piece in pieces]
    elif total is not None:
        one_each = total == len(pieces)
        counted_by, counts = "usage", [1 if one_each else -1] * len(pieces)
    else:
        counted_by, counts = "chunks", [1] * len(pieces)
    return counted_by, counts, sum(counts) if total is None else total


def _chunks(reply: Reply, pieces: Sequence[_Piece], counts: Sequence[int]) -> list[api.Event]:
    known = all(piece.ids for piece in pieces)
    found: list[api.Event] = []
    for piece, count in zip(pieces, counts, strict=True):
        stamp, read = reply.arrived_ns[piece.index], reply.read_ns[piece.index]
        found.append(
            api.Chunk(
                reply.request,
                (piece.ids or []) if known else [],
                piece.text,
                [],
                tokens=None if known else count,
                arrived_ns=read if stamp < 0 else stamp,
                lag_ns=-1 if stamp < 0 else read - stamp,
            )
        )
    return found


def arrival(reply: Reply, index: int) -> int:
    """The kernel's stamp, or else that of the reading."""
    stamp = reply.arrived_ns[index]
    return reply.read_ns[index] if stamp < 0 else stamp


# ---------------------------------------------------------------------------------------------------------


def refusal(status: int, body: bytes) -> str:
    """What a reply with another status than 200 says."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body.decode(errors="replace")
    message = _message(said)
    hint = "; --stop-on-eos leaves ignore_eos out" if status in (400, 422) and "ignore_eos" in message else ""
    return f"HTTP {status}" + (f": {message}" if message else "") + hint


def _message(said: Any) -> str:
    """One line out of the shapes in which servers tell of an error."""
    while isinstance(said, dict):
        inner = next((said[name] for name in ("error", "message", "detail") if said.get(name)), None)
        said = msgspec.json.encode(said).decode() if inner is None else inner
    return " ".join(str(said).split())[:SHOWN]
