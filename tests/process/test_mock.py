"""The mock server: it talks as servers do, its tokens come when they are due, and it says how late it was."""

import json
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_bench.harness.serve import mock
from overlap_bench.harness.serve.mock_answers import Answer, Body, StreamOptions, prompt_tokens
from tests.support.bench_command import PATIENCE_S, start
from tests.support.clockwork import installed
from tests.support.served import Server, serving, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mock")
    timing = ("--ttft-ms", "30", "--itl-ms", "5", "--max-tokens-per-chunk", "3")
    with serving(installed(folder), folder, *timing) as found:
        yield found


def answer(total: int, most: int, **options: bool) -> Answer:
    """One that no connection waits for."""
    return Answer(
        connection=SimpleNamespace(),  # type: ignore[arg-type]
        name="cmpl-0",
        chat=False,
        streamed=True,
        options=StreamOptions(**options),
        prompt_tokens=2,
        total=total,
        due_ns=0,
        most=most,
        created=0,
    )


def asking(tokens: int, header: str = "", stream: bool = True) -> bytes:
    """A whole request."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": stream}).encode()
    length = f"Content-Length: {len(body)}\r\n"
    return f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{length}{header}\r\n".encode() + body


def test_a_stream_brings_as_many_tokens_as_asked_for_and_says_so(server: Server) -> None:
    events = server.events(
        COMPLETIONS, {"prompt": "a b c", "max_tokens": 10, "stream_options": {"include_usage": True}}
    )
    assert events[-1] is None
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    chunks = [event["choices"][0] for event in events[:-2]]
    assert [each["finish_reason"] for each in chunks] == [None] * (len(chunks) - 1) + ["length"]
    # 1, 2 and 3 tokens in turn; the last chunk holds what is left
    assert [each["text"].count("token") for each in chunks] == [1, 2, 3, 1, 2, 1]
    assert all(event["usage"] is None for event in events[:-2])


def test_a_chat_begins_with_a_role_that_is_no_token(server: Server) -> None:
    events = server.events(CHAT, {"messages": HELLO, "max_completion_tokens": 4})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == " token" * 4
    assert events[0]["object"] == "chat.completion.chunk"


def test_a_whole_answer_comes_at_once_when_its_last_token_is_due(server: Server) -> None:
    status, body = server.post(CHAT, {"messages": HELLO, "max_tokens": 3})
    assert status == 200
    assert body["choices"][0]["message"]["content"] == " token" * 3
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "a b c"}, 3),
        ({"prompt": ["a b", "c"]}, 3),
        ({"prompt": [[1, 2], [3]]}, 3),
        ({"messages": [{"role": "assistant", "content": None}]}, 0),
        ({"messages": [{"content": [{"type": "text", "text": "a b"}, {"type": "image_url"}]}]}, 2),
    ],
)
def test_a_prompt_has_as_many_tokens_as_ids_or_words(body: dict[str, Any], tokens: int) -> None:
    assert prompt_tokens(msgspec.convert(body, Body)) == tokens


def test_two_requests_on_one_connection_are_answered_in_order(server: Server) -> None:
    with socket.create_connection(server.address, timeout=PATIENCE_S) as client:
        client.sendall(asking(4, stream=False) + asking(2, "Connection: close\r\n", stream=False))
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert [received.count(b'"completion_tokens":%d' % count) for count in (4, 2)] == [1, 1]
    assert received.index(b'"completion_tokens":4') < received.index(b'"completion_tokens":2')


def test_it_says_how_late_it_was_until_told_to_forget(server: Server) -> None:
    server.ask("DELETE", "/lateness")
    server.events(COMPLETIONS, {"prompt": "a", "max_tokens": 10})
    _, said = server.get("/lateness")
    assert (said["first_token"]["count"], said["later_tokens"]["count"]) == (1, 5)
    assert 0 <= said["first_token"]["p50"] <= said["first_token"]["max"]
    server.ask("DELETE", "/lateness")
    assert server.get("/lateness")[1]["first_token"] == {"count": 0}


def test_a_client_that_hangs_up_takes_nothing_along(server: Server) -> None:
    with server.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 10_000}) as streaming:
        next(iter(streaming))
        streaming.reset()
    assert len(server.events(COMPLETIONS, {"prompt": "a", "max_tokens": 4})) == 4  # 1 + 2 + 1 tokens, [DONE]


@contextmanager
def connected() -> Iterator[tuple[mock.Mock, mock.Connection, socket.socket]]:
    """A mock of this process, its end of a connection, and a client's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        serving_it = mock.Mock(mock.make_timing(0, 0, 1), listener)
        connection = mock.Connection(serving_it, ours)
        serving_it._connections[ours.fileno()] = connection
        serving_it.epoll.register(ours)
        yield serving_it, connection, theirs
        connection.close()


def test_a_client_that_is_gone_before_its_answer_ends_its_own_connection_alone() -> None:
    """It sent two requests and hung up: the first answer's first byte shows it."""
    with connected() as (serving_it, connection, theirs):
        theirs.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        theirs.close()
        connection.read()
        assert not connection.open
        assert serving_it._connections == {}


def test_a_client_that_does_not_read_is_let_go_when_too_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mock, "MOST_UNSENT", 1 << 16)
    with connected() as (serving_it, connection, theirs):
        theirs.sendall(asking(mock.MOST_TOKENS))
        connection.read()
        for _ in range(mock.MOST_TOKENS // mock.BURST):
            if not connection.open:
                break
            serving_it._send_due()
        assert not connection.open
        assert serving_it._connections == {}


def test_requests_that_nobody_waits_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "MOST_BYTES", 1 << 16)
    with connected() as (_, connection, theirs):
        asked = 0
        while connection.open and asked < 1000:
            theirs.sendall(asking(1))
            asked += 1
            connection.read()
        assert not connection.open
        assert b"HTTP/1.1 413 " in theirs.recv(1 << 16)
        assert 10 < asked < 100


def test_answered_requests_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "MOST_BYTES", 1 << 16)
    with connected() as (serving_it, connection, theirs):
        for _ in range(200):
            theirs.sendall(asking(1))
            connection.read()
            serving_it._send_due()
            assert b"[DONE]" in theirs.recv(1 << 16)
        assert connection.open


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", COMPLETIONS, b"{", 400),
        ("POST", COMPLETIONS, b'{"max_tokens": "many"}', 400),
        ("POST", COMPLETIONS, b'{"max_tokens": 0}', 400),
        ("POST", COMPLETIONS, b'{"max_tokens": 99999999999999999999}', 400),
        ("POST", COMPLETIONS, b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        ("GET", COMPLETIONS, None, 404),
        ("POST", "/v1/embeddings", b"{}", 404),
    ],
)
def test_what_it_can_not_answer_is_an_error_as_openai_has_them(
    server: Server, method: str, path: str, body: bytes | None, status: int
) -> None:
    got, _, content = server.ask(method, path, body)
    assert got == status
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_a_request_that_does_not_end_is_refused_and_the_connection_closed(server: Server) -> None:
    with socket.create_connection(server.address, timeout=PATIENCE_S) as client:
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n".encode())
        with pytest.raises(OSError, match=r"reset|pipe"):
            client.sendall(b"a" * (64 << 20))
    assert server.get("/health") == (200, {"status": "ok"})


@given(total=st.integers(1, 60), most=st.integers(1, 7))
def test_every_token_is_in_one_chunk_and_none_comes_before_it_is_due(total: int, most: int) -> None:
    made = answer(total, most, continuous_usage_stats=True)
    sent = [made.token() for _ in range(total)]
    for due, data in enumerate(sent, start=1):
        counts = _counts(data)
        if counts:
            assert counts[-1] == due  # the chunk goes out with its last token, not before and not after
    sizes = [b - a for a, b in zip([0, *_counts(b"".join(sent))], _counts(b"".join(sent)), strict=False)]
    assert sum(sizes) == total
    assert sizes[0] == 1
    assert max(sizes) <= most


def _counts(data: bytes) -> list[int]:
    """Completion tokens so far, as each chunk says."""
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"] for line in lines]


@given(st.lists(st.integers(0, 1000)))
def test_what_waits_stands_in_the_order_in_which_it_is_due(dues: list[int]) -> None:
    queue: deque[Any] = deque()
    for due in dues:
        mock._queue(queue, SimpleNamespace(due_ns=due))  # type: ignore[arg-type]
    assert [each.due_ns for each in queue] == sorted(dues)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 300_000), min_size=1))
def test_percentiles_of_lateness_are_exact_to_the_microsecond(us: list[int]) -> None:
    lateness = mock.Lateness()
    for each in us:
        lateness.add(each * 1000)
    said = lateness.summary()
    assert said["count"] == len(us)
    assert said["max"] == max(us)
    for share in mock.PERCENTILES:
        below = sum(each <= said[f"p{share}"] for each in us)
        if said[f"p{share}"] < mock.LONGEST_US:
            assert below >= share / 100 * len(us)
            assert sum(each < said[f"p{share}"] for each in us) < share / 100 * len(us)


def test_ctrl_c_ends_a_mock_with_130(tmp_path: Path) -> None:
    bench = start(installed(tmp_path), tmp_path, "serve", "--mock", "--port", "0")
    bench.popen.stdout.readline()
    bench.popen.send_signal(2)
    assert bench.end()[0] == 130
