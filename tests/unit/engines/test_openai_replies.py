"""What is made of the bytes of a reply, however they were cut: no sockets."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import api
from engines.openai.events import split
from engines.openai.replies import Reply, outcome
from engines.openai.requests import body

DONE = b"data: [DONE]\n\n"


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(value: str, reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"text": value, "finish_reason": reason, **more}])


def said(value: str | None, reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"delta": {"content": value, **more}, "finish_reason": reason}])


def usage(tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": tokens})


def reply(*pieces: bytes, whole: bool = True, **more: Any) -> Reply:
    """Read one after the other: piece i arrived at 100 i and was read 7 later."""
    return Reply(
        1,
        5,
        sent_ns=10,
        submitted_ns=11,
        status=200,
        content_type="text/event-stream",
        pieces=list(pieces),
        arrived_ns=[100 * index for index in range(1, len(pieces) + 1)],
        read_ns=[100 * index + 7 for index in range(1, len(pieces) + 1)],
        whole=whole,
        **more,
    )


def served(*pieces: bytes, tokens: Any = None) -> tuple[list[api.Chunk], api.Finish, str]:
    found = outcome(reply(*pieces), tokens)
    *chunks, finish = found.events
    assert isinstance(finish, api.Finish), finish
    assert all(isinstance(chunk, api.Chunk) for chunk in chunks)
    return chunks, finish, found.counted_by  # type: ignore[return-value]


def error(*pieces: bytes, **more: Any) -> str:
    (found,) = outcome(reply(*pieces, **more)).events
    assert isinstance(found, api.Error)
    return found.message


LINES = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), max_size=8)


@given(
    st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 400), max_size=30),
    st.booleans(),
)
def test_events_are_the_same_however_the_stream_is_cut(
    events: list[list[str]], end: str, cuts: list[int], comments: bool
) -> None:
    whole = "".join(
        (f": hello{end}" if comments else "") + "".join(f"data: {line}{end}" for line in lines) + end
        for lines in events
    ).encode()
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    pieces = [whole[first:last] for first, last in pairwise(places)]
    found, rest = split(pieces)
    assert [data for _, data in found] == ["\n".join(lines).encode() for lines in events]
    assert not rest.strip(b"\r\n")
    assert [index for index, _ in found] == sorted(index for index, _ in found)


def test_an_event_has_the_stamp_of_the_piece_that_completed_it() -> None:
    one, two = text("One"), text(" two", "stop")
    chunks, finish, _ = served(one[:9], one[9:], two, DONE)
    assert [chunk.arrived_ns for chunk in chunks] == [200, 300]
    assert [chunk.lag_ns for chunk in chunks] == [7, 7]
    assert (finish.sent_ns, finish.submitted_ns, finish.arrived_ns) == (10, 11, 400)


def test_without_the_kernels_stamp_a_chunk_arrived_when_it_was_read_and_its_lag_is_not_known() -> None:
    late = reply(text("One", "stop"), DONE)
    late.arrived_ns = [-1, -1]
    chunk, finish = outcome(late).events
    assert isinstance(chunk, api.Chunk)
    assert isinstance(finish, api.Finish)
    assert (chunk.arrived_ns, chunk.lag_ns, finish.arrived_ns) == (107, -1, 207)


def test_a_chat_begins_with_its_first_content() -> None:
    chunks, _, _ = served(said("", role="assistant"), said(None), said("Hi"), said("", "stop"), DONE)
    assert [(chunk.text, chunk.arrived_ns) for chunk in chunks] == [("Hi", 300)]


def growing(tokens: int, reason: str | None = None, **choice: Any) -> bytes:
    return event(choices=[{**choice, "finish_reason": reason}], usage={"completion_tokens": tokens})


@pytest.mark.parametrize(
    ("pieces", "arrived", "counts"),
    [
        # Half a character, and what completes it: a step each, and so for vLLM's and SGLang's clients.
        ((text(""), text("é"), text(" a", "length"), usage(3)), [100, 200, 300], [1, 1, 1]),
        ((text("a"), text("", "stop"), usage(1)), [100], [1]),  # llama.cpp's end
        (
            (growing(1, text=""), growing(2, text="é"), growing(2, "stop", text=""), usage(2)),
            [100, 200],
            [1, 1],
        ),
        (
            (growing(1, text="a"), growing(2, "stop", text=""), usage(2)),  # an EOS, told and not shown
            [100, 200],
            [1, 1],
        ),
        ((text("a"), growing(1, "stop", text="")), [100], [1]),  # the sum, at the end alone
        (
            (
                growing(0, delta={"role": "assistant", "content": ""}),
                growing(1, delta={"content": ""}),
                growing(2, "length", delta={"content": "é"}),
            ),
            [200, 300],
            [1, 1],
        ),
        ((text("", token_ids=[]), text("a", "stop", token_ids=[6])), [200], [1]),
        ((text("", logprobs={"tokens": []}), text("a", "stop", logprobs={"tokens": ["a"]})), [200], [1]),
    ],
)
def test_a_token_without_text_is_a_chunk_where_there_is_one(
    pieces: tuple[bytes, ...], arrived: list[int], counts: list[int]
) -> None:
    chunks, _, _ = served(*pieces, DONE)
    assert [chunk.arrived_ns for chunk in chunks] == arrived
    assert [len(chunk.token_ids) or chunk.tokens for chunk in chunks] == counts


def test_a_thought_is_content() -> None:
    chunks, _, _ = served(said(None, reasoning_content="Hm"), said("Hi", "stop"), DONE)
    assert [chunk.text for chunk in chunks] == ["Hm", "Hi"]


@pytest.mark.parametrize(
    ("pieces", "counted_by", "counts", "total"),
    [
        ((text("a"), text("b", "stop"), usage(2)), "usage", [1, 1], 2),
        ((text("ab"), text("c", "stop"), usage(3)), "usage", [-1, -1], 3),
        ((text("ab"), text("c", "stop")), "chunks", [1, 1], 2),
        ((text("ab", token_ids=[4, 5]), text("c", "stop", token_ids=[6])), "ids", [2, 1], 3),
        ((text("", token_ids=[4]), text("é", "stop", token_ids=[6])), "ids", [1, 1], 2),
        (
            (text("ab", logprobs={"tokens": ["a", "b"]}), text("c", "stop", logprobs={"tokens": ["c"]})),
            "logprobs",
            [2, 1],
            3,
        ),
        (
            (
                event(choices=[{"text": "ab"}], usage={"completion_tokens": 2}),
                event(choices=[{"text": "cde", "finish_reason": "stop"}], usage={"completion_tokens": 5}),
                usage(5),
            ),
            "usage",
            [2, 3],
            5,
        ),
    ],
)
def test_tokens_are_counted_by_the_best_that_every_chunk_has(
    pieces: tuple[bytes, ...], counted_by: str, counts: list[int], total: int
) -> None:
    chunks, finish, way = served(*pieces, DONE)
    found = [len(chunk.token_ids) if chunk.tokens is None else chunk.tokens for chunk in chunks]
    assert (way, found, finish.completion_tokens) == (counted_by, counts, total)


def test_a_tokenizer_counts_where_the_server_gives_only_the_sum() -> None:
    chunks, finish, way = served(text("ab"), text("c", "stop"), usage(4), DONE, tokens=len)
    assert (way, [chunk.tokens for chunk in chunks], finish.completion_tokens) == ("tokenizer", [2, 1], 4)


@pytest.mark.parametrize(
    "pieces",
    [
        (text("a"), text("b", "length")),  # no [DONE]
        (text("a"), text("b"), DONE),  # no finish reason
        (text("a"), text("b", "stop"), b"data: [DONE]"),  # no last blank line
        (b": hello\n\n", text("a"), b"event: x\n\n", text("b", "stop"), DONE),
        (b"\xef\xbb\xbf" + text("a"), text("b", "stop"), DONE),
        (text("a") + text("b", "stop") + DONE,),
        (b'data: {"choices":\ndata: [{"text": "a"}]}\n\n', text("b", "stop"), DONE),
    ],
)
def test_what_servers_leave_out_or_add_is_no_failure(pieces: tuple[bytes, ...]) -> None:
    chunks, _, _ = served(*pieces)
    assert [chunk.text for chunk in chunks] == ["a", "b"]


@pytest.mark.parametrize(
    ("pieces", "more", "message"),
    [
        ((text("a"), b"data: {oops\n\n", DONE), {}, "chunk 2 of the stream is malformed"),
        ((text("a"), b"data: \xff\xfe\n\n", DONE), {}, "chunk 2 of the stream is malformed"),
        ((event(choices="many"),), {}, "chunk 1 of the stream is malformed: Expected `array`"),
        ((text("a"),), {}, "the stream ended too early: no finish reason, and no [DONE]"),
        ((), {}, "the stream ended too early"),
        (
            (text("a"), event(error={"message": "no\n room"})),
            {},
            "the server sent an error in the stream: no room",
        ),
        ((event(object="error", message="no room"),), {}, "the server sent an error in the stream: no room"),
        ((DONE,), {}, "the reply has no token"),
        ((text("", "stop"), usage(0), DONE), {}, "the reply has no token"),
        ((text("a"), text("", "abort"), DONE), {}, "the server broke off the reply: finish reason abort"),
        ((text("a"),), {"whole": False, "failure": "the stream was cut short"}, "the stream was cut short"),
    ],
)
def test_a_reply_that_is_none_says_why(pieces: tuple[bytes, ...], more: dict[str, Any], message: str) -> None:
    assert error(*pieces, **more).startswith(message)


def test_what_is_asked_holds_what_the_request_says() -> None:
    greedy = api.Request(0, "Hello", 16)
    asked = body(greedy, "m", "completions", "usage")
    assert asked == {
        "model": "m",
        "prompt": "Hello",
        "max_tokens": 16,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    drawn = api.Request(0, "Hello", 16, True, 0.5, 3, 0.9, 7, ["x"])
    asked = body(drawn, "m", "chat", "logprobs")
    assert asked["messages"] == [{"role": "user", "content": "Hello"}]
    assert {"ignore_eos", "prompt"}.isdisjoint(asked)
    assert (asked["seed"], asked["top_k"], asked["top_p"], asked["stop"]) == (7, 3, 0.9, ["x"])
    assert asked["logprobs"] is True
    assert body(api.Request(0, [1, 2], 4), "m", "completions", "ids")["return_token_ids"] is True
    with pytest.raises(api.BadSetting, match="asks with text"):
        body(api.Request(0, [1, 2], 4), "m", "chat", "ids")
