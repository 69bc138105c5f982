"""What is made of the bytes of a reply, however they were cut: no sockets."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from overlap_bench.engines import api
from overlap_bench.engines.openai.engine import tokens_of
from overlap_bench.engines.openai.events import split
from overlap_bench.engines.openai.replies import Reply, outcome
from overlap_bench.engines.openai.requests import body

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
        content_type=more.pop("content_type", "text/event-stream"),
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


def growing(tokens: int, reason: str | None = None, **choice: Any) -> bytes:
    return event(choices=[{**choice, "finish_reason": reason}], usage={"completion_tokens": tokens})


@pytest.mark.parametrize(
    ("pieces", "arrived", "counts"),
    [
        # Half a character, and what completes it: a step each, and so for vLLM's and SGLang's clients.
        ((text(""), text("é"), text(" a", "length"), usage(3)), [100, 200, 300], [1, 1, 1]),
        # A chat begins with its first content.
        ((said("", role="assistant"), said(None), said("Hi"), said("", "stop")), [300], [1]),
        ((text("a"), text("", "stop"), usage(1)), [100], [1]),  # llama.cpp's end
        ((text("a"), text("b"), text("", "stop"), usage(3)), [100, 200, 300], [1, 1, 1]),  # vLLM's, of an EOS
        ((text("a"), text("b"), text("", "length"), usage(3)), [100, 200], [-1, -1]),
        (  # two in one chunk, as it says itself, and an end that is no token
            (text("ab", token_ids=[1, 2]), text("c", token_ids=[3]), text("", "stop"), usage(3)),
            [100, 200],
            [2, 1],
        ),
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


def test_where_the_server_counts_as_many_tokens_as_chunks_no_tokenizer_knows_better() -> None:
    """Llama 2's gives a text one more token for the space that it begins with."""
    chunks, finish, way = served(text(" a"), text(" b", "stop"), usage(2), DONE, tokens=lambda text: 2)
    assert (way, [chunk.tokens for chunk in chunks], finish.completion_tokens) == ("usage", [1, 1], 2)


def test_a_tokenizer_counts_where_the_server_gives_only_the_sum() -> None:
    chunks, finish, way = served(text("ab"), text("c", "stop"), usage(4), DONE, tokens=len)
    assert (way, [chunk.tokens for chunk in chunks], finish.completion_tokens) == ("tokenizer", [2, 1], 4)
    chunks, *_ = served(text("ab"), text("c"), text("", "stop"), usage(3), DONE, tokens=len)
    assert [chunk.tokens for chunk in chunks] == [2, 1]


@pytest.mark.parametrize(
    "pieces",
    [
        (text("a"), text("b", "length")),  # no [DONE]
        (text("a"), text("b"), DONE),  # no finish reason
        (text("a"), text("b", "stop"), b"data: [DONE]"),  # no last blank line
        (b": hello\n\n", text("a"), b"event: x\n\n", text("b", "stop"), DONE),
        (b"\xef\xbb\xbf" + text("a"), text("b", "stop"), DONE),
        (b'data: {"choices":\ndata: [{"text": "a"}]}\n\n', text("b", "stop"), DONE),
        (b"data:\n\ndata: {}\n\ndata: null\n\n", text("a"), text("b", "stop"), b"data:[DONE] \r\n\r\n"),
        (event(choices=None), text("a"), event(choices=[None, {"delta": None}]), text("b", "stop"), DONE),
        (text("a"), text("b"), event(usage={"completion_tokens": 2})),  # the sum, and then no word of the end
        (text("a", finish_reason=None), text("b", error={}), event(choices=[{"finish_reason": "stop"}])),
        (said("a", role="assistant"), event(choices=None), said("b", "stop"), DONE),
        (said([{"type": "text", "text": "a"}]), said([{"text": "b"}, None, {"type": "image"}], "stop"), DONE),
        (text(["a"]), text({"value": "b"}, "stop"), DONE),
        (said(None, reasoning_content="a"), said("b", "stop"), DONE),
        (said(None, thinking="a", reasoning=""), said(None, "stop", refusal="b"), DONE),
        (said(None, reasoning=[{"text": "a"}], reasoning_content=""), said("b", "stop"), DONE),
    ],
)
def test_what_servers_leave_out_or_add_is_no_failure(pieces: tuple[bytes, ...]) -> None:
    chunks, _, _ = served(*pieces)
    assert [chunk.text for chunk in chunks] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (rb"\ud83d|\ude00", ["", "\N{GRINNING FACE}"]),
        (rb"\ud83d\ude00|!", ["\N{GRINNING FACE}", "!"]),
        (rb"\ude00|\ud83d", ["\ufffd", "\ufffd"]),
        (b"\xf0\x9f|\x98\x80", ["\ufffd", "\ufffd\ufffd"]),
        (b"\xff|a\tb\0", ["\ufffd", "a\tb\0"]),
    ],
)
def test_text_that_no_strict_decoder_takes_is_text(said: bytes, kept: list[str]) -> None:
    first, second = (b'data: {"choices": [{"text": "%b"}]}\n\n' % each for each in said.split(b"|"))
    chunks, finish, _ = served(first, second, event(choices=[], usage={"completion_tokens": 2}), DONE)
    assert [chunk.text for chunk in chunks] == kept
    assert finish.completion_tokens == 2
    msgspec.msgpack.encode(chunks)


@pytest.mark.parametrize("written", ["12", "12.0", '"12"', '"12.0"', "1.2e1"])
def test_a_count_is_read_however_it_is_written(written: str) -> None:
    sums = f'data: {{"usage": {{"prompt_tokens": {written}, "completion_tokens": {written}}}}}\n\n'.encode()
    again = event(choices=[], usage={"prompt_tokens": None, "completion_tokens": None, "total_tokens": True})
    _, finish, way = served(*[text("a")] * 11, text("a", "length"), sums, again, DONE)
    assert (finish.prompt_tokens, finish.completion_tokens, way) == (12, 12, "usage")


@pytest.mark.parametrize("written", ["null", "-1", "NaN", "1e999", "2.5", "true", '"many"', "[12]", "{}"])
def test_what_is_no_count_is_none(written: str) -> None:
    odd = f'data: {{"choices": [], "usage": {{"completion_tokens": {written}}}}}\n\n'.encode()
    _, finish, way = served(text("a"), text("b", "stop"), odd, DONE)
    assert (finish.completion_tokens, way) == (2, "chunks")


TEN = [said(" word") for _ in range(9)] + [said(" word", "length")]
THOUGHT = [said(None, reasoning_content="Hm, ") for _ in range(30)]


def sums(completion: int, thought: int | None = None, **more: Any) -> bytes:
    details = None if thought is None else {"reasoning_tokens": thought}
    counts = {"prompt_tokens": 5, "completion_tokens": completion, "completion_tokens_details": details}
    return event(choices=[], usage=counts | more)


@pytest.mark.parametrize(
    ("pieces", "total", "hidden", "doubtful"),
    [
        ([*TEN, sums(40, 30)], 10, 30, False),
        ([*TEN, sums(40, reasoning_tokens=30.0)], 10, 30, False),  # SGLang's
        ([*TEN, sums(10, 30, total_tokens=45)], 10, 30, False),  # xAI's: beside the completion's
        ([*TEN, sums(40, completion_tokens_details={"rejected_prediction_tokens": "30"})], 10, 30, False),
        ([*THOUGHT, *TEN, sums(40, 30)], 40, 0, False),
        ([*THOUGHT, *TEN, sums(10, 30, total_tokens=45)], 40, 0, False),
        ([said("<think>"), *TEN, sums(40, 30)], 40, 0, True),
        ([*[said("Hm, ")] * 30, *TEN, sums(40, 30)], 40, 0, False),  # a thought that is not told apart
        ([*TEN, sums(40)], 40, 0, True),
        ([*TEN, sums(10, 0)], 10, 0, False),
        ([*TEN, sums(11)], 11, 0, False),  # a token that ends it
        ([said("several words at a time"), said(", and then some", "stop"), sums(8)], 8, 0, False),
        ([*TEN, sums(0)], 10, 0, False),
        ([*TEN, sums(1)], 10, 0, False),  # what the last chunk alone holds
    ],
)
def test_tokens_that_are_counted_and_not_streamed_are_told_from_those_that_came(
    pieces: list[bytes], total: int, hidden: int, doubtful: bool
) -> None:
    found = outcome(reply(*pieces, DONE))
    finish = found.events[-1]
    assert isinstance(finish, api.Finish)
    assert (finish.completion_tokens, found.hidden, found.doubtful) == (total, hidden, doubtful)


def test_what_came_is_known_where_each_chunk_tells_its_tokens() -> None:
    ids = [event(choices=[{"text": "a", "token_ids": [4]}]) for _ in range(10)]
    grown = [growing(30 + each, text="a") for each in range(1, 11)]
    for pieces, tokens in (([*ids, sums(40)], None), (TEN, len), (grown, None)):
        found = outcome(reply(*pieces, sums(40 if pieces is not TEN else 90, 30), DONE), tokens)
        *chunks, finish = found.events
        assert isinstance(finish, api.Finish)
        held = [len(each.token_ids) if each.tokens is None else each.tokens for each in chunks]  # type: ignore[union-attr]
        assert sum(held) == finish.completion_tokens == (50 if pieces is TEN else 10)
        assert found.hidden == (40 if pieces is TEN else 30)


@pytest.mark.parametrize(
    ("arrived_ms", "tokens", "pace"),
    [
        ([200, 200, 200, 200], 4, "at once"),
        ([200, 200.1, 200.2, 203], 4, "at once"),  # one of them was written late
        ([200], 4, "at once"),
        ([200], 1, "streamed"),
        ([200, 210, 220, 230], 4, "streamed"),
        ([2, 2, 2, 2], 4, "at once"),
        ([2000, 2001, 2002, 2003], 4, "streamed"),  # a long prompt, and then a token a millisecond
        ([100, 100, 100, 100, 200, 200, 200, 200], 8, "in bursts"),
        ([100, 100, 120, 120, 140, 140], 6, "streamed"),  # two tokens of a step
    ],
)
def test_chunks_that_were_gathered_on_their_way_are_told_from_streamed_ones(
    arrived_ms: list[float], tokens: int, pace: str
) -> None:
    words = [text("word") for _ in arrived_ms]
    read = reply(*words, usage(tokens))
    read.sent_ns = 0
    read.arrived_ns = [round(each * 1e6) for each in (*arrived_ms, arrived_ms[-1])]
    read.read_ns = [each + 1000 for each in read.arrived_ns]
    found = outcome(read)
    assert found.pace == pace
    *chunks, finish = found.events
    assert isinstance(finish, api.Finish)
    # What came all at once is one chunk: no time of a token is made of it.
    assert len(chunks) == len(found.places) == (1 if pace == "at once" else len(words))
    assert "".join(chunk.text for chunk in chunks) == "word" * len(words)  # type: ignore[union-attr]
    assert sum(chunk.tokens for chunk in chunks) in (tokens, -1)  # type: ignore[union-attr, misc]
    assert finish.completion_tokens == tokens


IN_STREAM = "the server sent an error in the stream: "
JSON = {"content_type": "application/json"}


@pytest.mark.parametrize(
    ("pieces", "more", "message"),
    [
        ((text("a"), b"data: {oops\n\n", DONE), {}, "chunk 2 of the stream is malformed"),
        ((text("a"), b"data: \xff\xfe\n\n", DONE), {}, "chunk 2 of the stream is malformed"),
        ((event(choices="many"),), {}, "the stream ended too early"),
        ((text("a"),), {}, "the stream ended too early: no finish reason, and no [DONE]"),
        ((), {}, "the stream ended too early"),
        (
            (text("a"), event(error={"message": "no\n room"})),
            {},
            f"{IN_STREAM}no room",
        ),
        ((event(object="error", message="no room"),), {}, f"{IN_STREAM}no room"),
        ((b"event: error\n" + event(message="no room", code=500),), {}, f"{IN_STREAM}no room"),
        ((event(error="no room", choices=[]),), {}, f"{IN_STREAM}no room"),
        ((text("a", error={"message": "no room"}),), {}, f"{IN_STREAM}no room"),
        ((event(error={"a": "\ud83d"}),), {}, IN_STREAM + '{"a": "\\ud83d"}'),
        ((b"data: no room\n\n",), {}, "chunk 1 of the stream is malformed: Expecting value: line 1 column 1"),
        ((b"data: " + b"[" * 9999 + b"\n\n",), {}, "chunk 1 of the stream is malformed: it is nested"),
        ((sums(12, 12), DONE), {}, "the server counts 12 tokens and streams none"),
        (
            (event(choices=[{"message": {"content": "a"}, "finish_reason": "stop"}]), sums(12), DONE),
            {},
            "the server counts 12 tokens, and no event of its stream has a text where OpenAI's API has it",
        ),
        ((b'{"error": "no room"}',), JSON, "the server sent an error: no room"),
        ((b'{"choices": []}',), JSON, "the reply is not an event stream: its type is application/json"),
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


def test_a_usage_that_comes_with_an_empty_choice_is_no_token() -> None:
    """As OpenRouter and LiteLLM's proxy send it, after the finish reason."""
    last = event(choices=[{"delta": {"content": ""}, "finish_reason": None}], usage={"completion_tokens": 2})
    chunks, finish, _ = served(said("a"), said("b"), said("", "stop"), last, DONE)
    assert [chunk.tokens for chunk in chunks] == [1, 1]
    assert finish.completion_tokens == 2
    hidden = event(
        choices=[{"delta": {"content": ""}, "finish_reason": None}],
        usage={"completion_tokens": 64, "completion_tokens_details": {"reasoning_tokens": 64}},
    )
    (error,) = outcome(reply(said("", "length"), hidden, DONE), None).events
    assert isinstance(error, api.Error)
    assert "counts 64 tokens and streams none" in error.message


def test_a_tokenizer_that_puts_a_space_before_each_text_counts_a_chunk_s_own_once(tmp_path: Path) -> None:
    """As Llama 2's does: taken as it is, " b" would be two tokens."""
    words = {word: number for number, word in enumerate(("<unk>", "\u2581", "\u2581a", "\u2581b"))}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    made.save(str(tmp_path / "tokenizer.json"))
    assert len(made.encode(" b", add_special_tokens=False).ids) == 2
    count = tokens_of(str(tmp_path / "tokenizer.json"))
    assert count is not None
    assert [count(text) for text in ("a", " b", "a b", " ")] == [1, 1, 2, 2]


def test_a_tokenizer_whose_spaces_are_tokens_counts_each(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(("<unk>", " ", "a", "b"))}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    made.save(str(tmp_path / "tokenizer.json"))
    count = tokens_of(str(tmp_path / "tokenizer.json"))
    assert count is not None
    assert [count(text) for text in ("a", " b", "a b", " ")] == [1, 2, 3, 1]
