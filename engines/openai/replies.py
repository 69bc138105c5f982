"""From what was read of a reply to the events of the engine protocol: chunks with tokens and stamps, and an
end. Pure: nothing here is done while anything waits to be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.openai import events, lenient
from overlap_bench.engines.openai.counting import Counted, Piece, Tokens, Usage, count

DONE = b"[DONE]"
STREAM = "text/event-stream"
BROKEN_OFF = ("abort", "error")  # finish reasons: SGLang's and vLLM's of a request that they gave up
SHOWN = 200  # characters of what a server said of an error
# Of these some servers send two, equal.
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
TOGETHER_NS = 300_000  # between two chunks: less than any model takes for a token
AT_ONCE = 0.1  # of the time from the request to the first chunk
BURST = 4  # chunks

Pace = Literal["streamed", "in bursts", "at once"]


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is sent on for a reply, and how the tokens of its chunks were counted: by "ids", "logprobs",
    "usage", "tokenizer", or as one per chunk ("chunks"); "" where it failed. A reply that came all at once is
    one chunk. `places` tells which events of the stream the chunks are. `hidden` tokens are in the server's
    count and in no chunk; a count is `doubtful` where it is more than the text is likely to hold, and nothing
    says why."""

    events: list[api.Event]
    counted_by: str = ""
    read_together: int = 0  # chunks that were read in one piece with the one before
    places: tuple[int, ...] = ()
    hidden: int = 0
    doubtful: bool = False
    pace: Pace = "streamed"


# ---------------------------------------------------------------------------------------------------------


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
    found, rest = events.split(reply.pieces)
    if reply.whole and (data := events.data_of(rest)) is not None:
        found.append((len(reply.pieces) - 1, data))  # some servers leave the last blank line out
    is_stream = reply.content_type.partition(";")[0].strip().lower() == STREAM
    if reply.status and not (is_stream or found):
        raise _Wrong(_no_stream(reply))
    pieces, usage, reason, done = _read(found, tokens)
    if reply.failure:
        raise _Wrong(reply.failure)
    if not (reason or done):
        raise _Wrong("the stream ended too early: no finish reason, and no [DONE]")
    if reason in BROKEN_OFF:
        raise _Wrong(f"the server broke off the reply: finish reason {reason}")
    counted = count(pieces, usage, tokens)
    # One token without a text, as one that ends the reply, need not show in a chunk.
    if not pieces and counted.total != 1:
        raise _Wrong(_no_token(counted))
    chunks = _chunks(reply, pieces, counted.counts)
    how = pace(reply.sent_ns, chunks, counted.total)
    if how == "at once":  # gaps between these are of a socket, and no time of a token is made of them
        chunks = [_joined(chunks)]
    finish = api.Finish(
        reply.request,
        reason or "stop",
        usage.prompt or reply.prompt_tokens,
        counted.total,
        reply.accepted_ns,
        -1,
        -1,
        sent_ns=reply.sent_ns,
        submitted_ns=reply.submitted_ns,
        arrived_ns=arrival(reply, len(reply.pieces) - 1) if reply.pieces else -1,
    )
    return Outcome(
        [*chunks, finish],
        counted.by,
        sum(reply.read_ns[first.index] == reply.read_ns[second.index] for first, second in pairwise(pieces)),
        tuple(piece.place for piece in pieces[: len(chunks)]),
        counted.hidden,
        counted.doubtful,
        how,
    )


def _no_token(counted: Counted) -> str:
    if counted.hidden:
        return (
            f"the server counts {counted.hidden} tokens and streams none, as of a thought that it hides; try "
            "a larger --max-new-tokens"
        )
    if counted.total:
        return (
            f"the server counts {counted.total} tokens, and no event of its stream has a text where OpenAI's "
            "API has it (content or text)"
        )
    return "the reply has no token"


def _no_stream(reply: Reply) -> str:
    body = b"".join(reply.pieces)
    with suppress(ValueError):
        said = lenient.decode(body)
        if isinstance(said, dict) and (error := _error(said, ())) is not None:
            return f"the server sent an error: {_message(error)}"
    return f"the reply is not an event stream: its type is {reply.content_type or 'not given'}"


def _read(found: Sequence[tuple[int, bytes]], tokens: Tokens | None) -> tuple[list[Piece], Usage, str, bool]:
    """Chunks that hold tokens, what the server counted, the finish reason ("" for none), and whether the end
    was told: by [DONE], or by a usage in a chunk of its own, which comes last.

    A token without a text (half a character, a special token) is a chunk like any other, where the chunk
    shows that there is one (_holds_token); the first chunk of a chat has a role, and shows none. The token
    that ends a text comes with the finish reason, and is counted: where the usage is one more than the chunks
    before, and nothing tells that one of these holds two, that is it, and its chunk is the last. Without it,
    TPOT would be of a gap too few.
    """
    pieces: list[Piece] = []
    stop: Piece | None = None
    usage, reason, done, so_far = Usage(), "", False, None
    for number, (index, data) in enumerate(found):
        if data.strip() in (b"", DONE):
            done = done or bool(data.strip())
            continue
        try:
            part = lenient.decode(data)
        except ValueError as error:
            shown = " ".join(data.decode(errors="replace").split())[:SHOWN]
            raise _Wrong(f"chunk {number + 1} of the stream is malformed: {error}: {shown}") from None
        if not isinstance(part, dict):
            continue
        choices = lenient.members(part, "choices")
        wrong = _error(part, choices)
        if wrong is not None:
            raise _Wrong(f"the server sent an error in the stream: {_message(wrong)}")
        completed = usage.take(part["usage"]) if isinstance(part.get("usage"), dict) else None
        done = done or (bool(completed) and not choices)
        for choice in choices:
            ended, told = choice.get("finish_reason"), bool(reason)
            reason = ended if isinstance(ended, str) and ended else reason
            piece = _piece(choice, number, index, completed)
            # Behind the end, some servers send the usage with a choice in which there is nothing.
            if _holds_token(choice, piece, so_far) and not (told and _is_empty(piece)):
                pieces.append(piece)
            elif ended == "stop" and piece.ids is None and piece.logprobs is None:
                stop = piece
            so_far = so_far if completed is None else completed
    streamed = 0 if usage.made is None else usage.made - usage.reasoning - usage.rejected
    told = any(piece.ids or piece.logprobs for piece in pieces)
    if tokens is not None and not told:
        told = sum(tokens(piece.text) for piece in pieces) >= streamed
    if stop is not None and pieces and not told and streamed == len(pieces) + 1:
        pieces.append(stop)
    for piece, text in zip(pieces, lenient.whole_characters([each.text for each in pieces]), strict=True):
        piece.text = text
    return pieces, usage, reason, done


def _error(part: dict[str, Any], choices: Sequence[dict[str, Any]]) -> Any:
    """What a chunk says of a failure; None where it says of none."""
    for said in (part, *choices):
        if said.get("error"):
            return said["error"]
    named = "error" in (part.get("object"), part.get("type"))
    if named or not ("choices" in part or "usage" in part):
        return part.get("message") or part.get("detail") or (part if named else None)
    return None


def _piece(choice: dict[str, Any], number: int, index: int, completed: int | None) -> Piece:
    delta = choice.get("delta")
    said, thought = choice.get("text"), ""
    if isinstance(delta, dict):
        said = delta.get("content") or delta.get("refusal")
        thought = lenient.text(next((delta[name] for name in THOUGHTS if delta.get(name)), None))
    ids = choice.get("token_ids")
    if not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        ids = None
    logprobs = lenient.member(choice, "logprobs")  # "tokens" of a completion, "content" of a chat
    listed = logprobs.get("tokens") if logprobs.get("content") is None else logprobs["content"]
    many = len(listed) if isinstance(listed, list) else None
    return Piece(number, index, thought + lenient.text(said), bool(thought), ids, many, completed)


def _is_empty(piece: Piece) -> bool:
    return not (piece.text or piece.ids or piece.logprobs)


def _holds_token(choice: dict[str, Any], piece: Piece, so_far: int | None) -> bool:
    """By its content; else by its usage, where that grows from chunk to chunk (`so_far`: the one before; a
    usage that comes only with the end is the sum). Without that, each chunk of a completion is a step, as
    vLLM's and SGLang's clients count them, except for one without text that brings the end."""
    if not _is_empty(piece):
        return True
    if piece.ids is not None or piece.logprobs is not None:
        return False
    if piece.completed is not None and (so_far is not None or not choice.get("finish_reason")):
        return piece.completed > (so_far or 0)
    return choice.get("text") is not None and not choice.get("finish_reason")


def pace(sent_ns: int, chunks: Sequence[api.Chunk], tokens: int) -> Pace:
    """How the chunks of a reply came. All within so little of the time until the first one, and faster than
    any model computes, were gathered on their way; so was a single chunk of several tokens."""
    if len(chunks) < 2:
        return "at once" if len(chunks) < tokens and chunks else "streamed"
    gaps = [after.arrived_ns - before.arrived_ns for before, after in pairwise(chunks)]
    first = chunks[0].arrived_ns - sent_ns
    late = max(0, chunks[0].lag_ns)  # what lies unread is read together
    if median(gaps) < TOGETHER_NS and sum(gaps) + late < AT_ONCE * first:
        return "at once"
    bursts = 1 + sum(gap >= TOGETHER_NS for gap in gaps)
    return "in bursts" if len(chunks) >= BURST * bursts and late < TOGETHER_NS else "streamed"


def _chunks(reply: Reply, pieces: Sequence[Piece], counts: Sequence[int]) -> list[api.Chunk]:
    known = all(piece.ids for piece in pieces)
    found: list[api.Chunk] = []
    for piece, held in zip(pieces, counts, strict=True):
        stamp, read = reply.arrived_ns[piece.index], reply.read_ns[piece.index]
        found.append(
            api.Chunk(
                reply.request,
                (piece.ids or []) if known else [],
                piece.text,
                [],
                tokens=None if known else held,
                arrived_ns=read if stamp < 0 else stamp,
                lag_ns=-1 if stamp < 0 else read - stamp,
            )
        )
    return found


def _joined(chunks: Sequence[api.Chunk]) -> api.Chunk:
    """All of them as the one that came first."""
    counts = [each.tokens for each in chunks if each.tokens is not None]
    return msgspec.structs.replace(
        chunks[0],
        token_ids=[token for each in chunks for token in each.token_ids],
        text="".join(each.text for each in chunks),
        tokens=(-1 if -1 in counts else sum(counts)) if counts else None,
    )


def arrival(reply: Reply, index: int) -> int:
    """The kernel's stamp, or else that of the reading."""
    stamp = reply.arrived_ns[index]
    return reply.read_ns[index] if stamp < 0 else stamp


# ---------------------------------------------------------------------------------------------------------


def refusal(status: int, body: bytes) -> str:
    """What a reply with another status than 200 says."""
    try:
        said: Any = lenient.decode(body)
    except ValueError:
        said = body.decode(errors="replace")
    message = _message(said)
    hint = "; --stop-on-eos leaves ignore_eos out" if status in (400, 422) and "ignore_eos" in message else ""
    return f"HTTP {status}" + (f": {message}" if message else "") + hint


def _message(said: Any) -> str:
    """One line out of the shapes in which servers tell of an error."""
    while isinstance(said, dict):
        inner = next((said[name] for name in ("error", "message", "detail") if said.get(name)), None)
        said = json.dumps(said) if inner is None else inner
    return " ".join(str(said).encode(errors="replace").decode().split())[:SHOWN]
