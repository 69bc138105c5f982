"""`bench serve` and clients that ask for what can't be: each is refused, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from tokenizers import Tokenizer, normalizers

from engines import api
from engines.overlap.presets import tokenizer_file
from experiments.common.bench_command import PATIENCE_S
from harness.common import processes
from harness.common.processes import Child
from harness.common.signals import Interrupted, interruptible
from harness.run.hosts import RunFailed
from harness.serve import engine_process, places
from harness.serve.engine_process import EngineProcess
from harness.serve.parsing import Refused, Served, parse_completion
from harness.serve.places import Places
from tests.process.test_serve import ARM, CHAT, CLOCKWORK, COMPLETIONS, LONG
from tests.support import gap
from tests.support.clockwork import installed
from tests.support.served import Server, serving

HUGE = 1 << 70
SLOW = "hello world " * 1_000_000  # seconds of tokenizing
IN_ALL = 5  # places of the server


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A quick engine with the presets' tokenizer, a context of 1,024 tokens and few places."""
    folder = tmp_path_factory.mktemp("bounded")
    settings = ("--set", f"tokenizer={tokenizer_file('tiny-gpt2')}", "--set", "max_context=1024")
    with serving(installed(folder), folder, *CLOCKWORK, *settings, "--max-requests", str(IN_ALL)) as found:
        yield found
    assert "Traceback" not in found.bench.stderr.read_text()


@pytest.fixture(scope="module")
def unbounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of one whose tokenizer strips spaces, so that a text of any length may fit."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file("tiny-gpt2")))
    tokenizer.normalizer = normalizers.Strip()
    path = tmp_path_factory.mktemp("unbounded") / "tokenizer.json"
    tokenizer.save(str(path))
    return (*CLOCKWORK, "--set", f"tokenizer={path}", "--set", "max_context=64")


def in_use(server: Server) -> float:
    meters = server.meters()
    return meters["bench_requests_in_flight"] + meters["bench_requests_preparing"]


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def freeze(server: Server) -> list[psutil.Process]:
    """No prompt is done any more: these processes do not even end but by being killed."""
    server.bench.look()
    found = [each for each in server.bench.seen.values() if "tokenizing_process" in " ".join(each.cmdline())]
    for each in found:
        each.suspend()
    return found


@contextmanager
def sent(server: Server, body: dict[str, Any], missing: int = 0) -> Iterator[socket.socket]:
    """A request, `missing` bytes short of its end."""
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content) + missing}\r\n\r\n"
    with socket.create_connection(server.address, timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + content)
        yield client


def said(client: socket.socket) -> bytes:
    """All that is answered, until the connection is closed."""
    received = b""
    while piece := client.recv(1 << 16):
        received += piece
    return received


# -- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1 << 63])
@pytest.mark.parametrize(
    "name", ["seed", "top_k", "max_tokens", "max_completion_tokens", "min_tokens", "prompt"]
)
def test_a_number_out_of_its_range_is_refused_and_takes_no_place(
    bounded: Server, name: str, value: int
) -> None:
    """As often as there are places: a leaked one would lock the server."""
    for _ in range(IN_ALL + 1):
        status, body = bounded.post(COMPLETIONS, {**LONG, name: [value] if name == "prompt" else value})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert name in body["error"]["message"]
        assert "Expected `int`" in body["error"]["message"]
    assert in_use(bounded) == 0
    assert bounded.post(COMPLETIONS, {**LONG, "max_tokens": 3})[0] == 200


@pytest.mark.parametrize(("name", "values"), [("temperature", [-1, "NaN"]), ("top_p", [0, -0.1, 1.1])])
def test_a_fraction_out_of_its_range_is_refused(bounded: Server, name: str, values: list[float]) -> None:
    for value in values:
        assert bounded.post(COMPLETIONS, {**LONG, name: value})[0] == 400


def test_a_request_that_cannot_be_sent_to_the_engine_is_not_in_flight() -> None:
    """Whatever the reason; one that nobody thought of would else have its place for ever."""
    with EngineProcess(ARM) as engine:
        with pytest.raises(OverflowError):
            engine.submit(api.Request(0, [HUGE], 3))
        assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (b'"stop": [' + b'"a",' * 16 + b'"a"]', "Expected `array` of length <= 16 - at `$.stop`"),
        (b'"stop": "' + b"a" * 257 + b'"', "Expected `str` of length <= 256 - at `$.stop`"),
        (b'"seed": ' + b"1" * 5000, "Integer value out of range - at `$.seed`"),
        (b'"temperature": 1e999', "Number out of range - at `$.temperature`"),
        (
            b'"metadata": ' + b"[" * 100_000 + b"]" * 100_000,
            "the body is not a JSON object: maximum recursion",
        ),
        (b'"n": 1e999', "n=1e999 is not supported"),
        (b'"n": "\\ud800"', "the body is not a JSON object"),
        (b'"suffix": "\xff"', 'suffix="\ufffd" is not supported'),
        (b'"n": ' + b"1" * 1000, f"n={'1' * 100}... is not supported"),
        (b'"' + b"a" * 1000 + b'": 1', f"unknown field '{'a' * 100}...'"),
        (b'"model": "' + b"a" * 1000 + b'"', f"the model '{'a' * 100}...' does not exist"),
    ],
)
def test_what_is_beyond_measure_is_refused_in_a_line_of_measure(field: bytes, message: str) -> None:
    body = b'{"prompt": "a", ' + field + b"}"
    with pytest.raises(Refused) as caught:
        parse_completion(body, Served("m", 64, 1.0))
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("piece", [b"1,", b"[],", b"[1],"])
def test_of_more_ids_than_the_context_has_room_for_none_is_read(piece: bytes) -> None:
    """A list of numbers that are not even numbers shows it."""
    body = b'{"prompt": [' + piece * 64 + b"nonsense]}"
    with pytest.raises(Refused, match="the body is not a JSON object"):
        parse_completion(body, Served("m", 64, 1.0))
    body = b'{"prompt": [' + piece * 64 + b"null]}"
    with pytest.raises(Refused, match="context is 64 tokens, and the prompt has more than 64"):
        parse_completion(body, Served("m", 64, 1.0))
    with pytest.raises(Refused, match=r"Expected|several prompts"):
        parse_completion(body, Served("m", 65, 1.0))


# -- lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "a list of it", "a chat", "ids", "a list of ids"])
@pytest.mark.parametrize(("words", "status"), [(20_000, 400), (1_000_000, 413)])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    bounded: Server, form: str, words: int, status: int
) -> None:
    text, ids = "hello world " * words, [1] * (6 * words)
    path, body = {
        "text": (COMPLETIONS, {"prompt": text}),
        "a list of it": (COMPLETIONS, {"prompt": [text]}),
        "a chat": (CHAT, {"messages": [{"role": "user", "content": text}]}),
        "ids": (COMPLETIONS, {"prompt": ids}),
        "a list of ids": (COMPLETIONS, {"prompt": [ids]}),
    }[form]
    before = psutil.Process(bounded.bench.popen.pid).memory_info().rss
    got, answer = bounded.post(path, body)
    assert (got, answer["error"]["code"]) == (status, "context_length_exceeded")
    assert "context" in answer["error"]["message"]
    assert re.search(r"more than \d+", answer["error"]["message"])  # nobody counted its tokens
    assert psutil.Process(bounded.bench.popen.pid).memory_info().rss < before + (16 << 20)
    assert in_use(bounded) == 0


def test_a_prompt_that_cannot_fit_does_not_wait_its_turn(bounded: Server) -> None:
    frozen = freeze(bounded)
    try:
        status, body = bounded.post(COMPLETIONS, {"prompt": "hello world " * 20_000})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    finally:
        for each in frozen:
            each.resume()


def test_the_longest_prompt_that_fits_is_served(bounded: Server) -> None:
    """As its longest token as often as there is room, written as JSON can write it at its longest."""
    longest = max(Tokenizer.from_file(str(tokenizer_file("tiny-gpt2"))).get_vocab(), key=len)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in longest * 1000)
    status, _, answer = bounded.ask(
        "POST", COMPLETIONS, f'{{"prompt": "{escaped}", "max_tokens": 1}}'.encode()
    )
    assert status == 200, answer


# -- places ----------------------------------------------------------------------------------------------


def test_half_a_request_has_a_place_until_its_client_hangs_up(bounded: Server) -> None:
    with ExitStack() as clients:
        for _ in range(IN_ALL):
            clients.enter_context(sent(bounded, LONG, missing=1))
        until(lambda: in_use(bounded) == IN_ALL)
        assert bounded.post(COMPLETIONS, LONG)[0] == 429
    until(lambda: in_use(bounded) == 0)
    assert bounded.post(COMPLETIONS, {**LONG, "max_tokens": 3})[0] == 200


def test_half_a_request_has_a_place_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rooms = Places()
        async with rooms.take() as place:
            place.read()
            with pytest.raises(Refused) as caught:
                async with rooms.take():
                    await asyncio.Event().wait()
            assert caught.value.status == 408
            assert rooms.taken == {place}  # a whole one may take its time

    monkeypatch.setattr(places, "READING_S", 0.05)
    asyncio.run(main())


def test_all_bodies_together_hold_no_more_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        rooms = Places()
        async with rooms.take() as first:
            first.hold(60)
            with pytest.raises(Refused) as caught:
                async with rooms.take() as second:
                    second.hold(41)
            assert (caught.value.status, caught.value.retry_s) == (429, 1)
            async with rooms.take() as second:
                second.hold(40)
        assert (rooms.held, rooms.taken) == (0, set())

    monkeypatch.setattr(places, "MOST_HELD", 100)
    asyncio.run(main())


@pytest.mark.parametrize(
    "error", [Refused(400, "no"), RuntimeError("what nobody thought of"), TimeoutError("another's")]
)
def test_whatever_happens_in_a_place_it_is_free_behind_it(error: Exception) -> None:
    rooms = Places()

    async def fail() -> None:
        async with rooms.take() as place:
            place.hold(7)
            raise error

    with pytest.raises(type(error)) as caught:
        asyncio.run(fail())
    assert caught.value is error
    assert (rooms.held, rooms.taken) == (0, set())


@pytest.mark.parametrize(
    "endless", [b"A: " + b"a" * 1000, b"a: b\r\n" * 100], ids=["one header", "many headers"]
)
def test_a_head_that_does_not_end_is_cut_off(bounded: Server, endless: bytes) -> None:
    before = psutil.Process(bounded.bench.popen.pid).memory_info().rss
    with socket.create_connection(bounded.address, timeout=PATIENCE_S) as client:
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode())
        with pytest.raises(OSError, match=r"reset|pipe"):
            client.sendall(endless * 100_000)
    assert psutil.Process(bounded.bench.popen.pid).memory_info().rss < before + (16 << 20)


def test_an_engine_that_is_stopped_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "LOOK_S", 0.02)
    start = processes.start

    def start_stopped(*given: Any) -> Child:
        child = start(*given)
        psutil.Process(child.pid).suspend()
        return child

    monkeypatch.setattr(processes, "start", start_stopped)
    with (
        EngineProcess(ARM) as engine,
        pytest.raises(RunFailed, match=r"^the engine host \(pid \d+\) is stop"),
    ):
        engine.boot()


def test_however_many_ask_for_gauges_the_engine_is_asked_once() -> None:
    """It answers between two steps, and this one does not answer at all."""

    async def ask(engine: EngineProcess) -> list[dict[str, int]]:
        return await asyncio.gather(*(engine.gauges() for _ in range(20)))

    with EngineProcess(ARM) as engine, zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.bind(f"ipc://{engine._room / 'inbox'}")
        engine._inbox.connect(f"ipc://{engine._room / 'inbox'}")
        assert asyncio.run(ask(engine)) == [{}] * 20
        assert inbox.poll(PATIENCE_S * 1000)
        assert isinstance(msgspec.msgpack.decode(inbox.recv(), type=api.ToHost), api.ReadGauges)
        assert not inbox.poll(100)


# -- tokenizing ------------------------------------------------------------------------------------------


def test_a_client_that_hangs_up_while_its_prompt_is_tokenized_is_forgotten(
    tmp_path: Path, unbounded: tuple[str, ...]
) -> None:
    with serving(installed(tmp_path), tmp_path, *unbounded) as server:
        with ExitStack() as clients:
            for _ in range(4):
                clients.enter_context(sent(server, {"prompt": SLOW}))
            until(lambda: server.meters()["bench_prompts_waiting"] == 2)
            meters = server.meters()
            assert meters["bench_prompts_tokenizing"] == 2
            assert (meters["bench_requests_preparing"], meters["bench_requests_in_flight"]) == (4, 0)
            freeze(server)
        until(lambda: server.meters()["bench_prompts_tokenizing"] == 0)
        meters = server.meters()
        assert meters['bench_requests_total{endpoint="completions",outcome="cancelled"}'] == 4
        assert meters["bench_requests_preparing"] == meters["bench_prompts_waiting"] == 0
        assert server.post(COMPLETIONS, {"prompt": "Hello", "max_tokens": 3})[0] == 200


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_waits_for_no_request_that_is_not_in_the_engine(
    tmp_path: Path, unbounded: tuple[str, ...], which: signal.Signals
) -> None:
    """Not for half of one, not for one that is tokenized, not for one that waits to be."""
    with serving(installed(tmp_path), tmp_path, *unbounded) as server, ExitStack() as clients:
        asked = [clients.enter_context(sent(server, {"prompt": SLOW})) for _ in range(3)]
        asked.append(clients.enter_context(sent(server, LONG, missing=1)))
        until(lambda: server.meters()["bench_requests_preparing"] == 4)
        until(lambda: server.meters()["bench_prompts_waiting"] == 1)
        freeze(server)
        server.bench.popen.send_signal(which)
        for client in asked:
            answer = said(client)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"the server is shutting down" in answer
        code, _, stderr = server.bench.end()
        assert code == (0 if which == signal.SIGTERM else 130)
        assert "Traceback" not in stderr
        assert not server.bench.left()


def test_a_server_that_is_killed_leaves_no_process_that_tokenizes(
    tmp_path: Path, unbounded: tuple[str, ...]
) -> None:
    with serving(installed(tmp_path), tmp_path, *unbounded) as server, sent(server, {"prompt": SLOW}):
        until(lambda: server.meters()["bench_prompts_tokenizing"])
        freeze(server)
        server.bench.popen.kill()
        until(lambda: not server.bench.left())


def test_half_a_request_is_told_that_the_engine_died_meanwhile(tmp_path: Path) -> None:
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK) as server:
        content = json.dumps(LONG).encode()
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        with socket.create_connection(server.address, timeout=PATIENCE_S) as client:
            client.sendall(head + content[:-1])
            until(lambda: in_use(server))
            server.bench.find("engines.host").kill()
            until(lambda: server.get("/health")[0] == 503)
            client.sendall(content[-1:])
            assert said(client).startswith(b"HTTP/1.1 503 ")


def test_told_to_stop_it_drops_a_client_that_does_not_read(tmp_path: Path) -> None:
    """What is sent to it would else wait in the server for ever."""
    with serving(installed(tmp_path), tmp_path, *CLOCKWORK) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 11)
        client.connect(server.address)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 3000)  # each is some kilobytes
        ports = (server.address[1], client.getsockname()[1])
        until(lambda: (before := unsent(ports)) and not time.sleep(0.5) and unsent(ports) == before)
        server.bench.popen.send_signal(signal.SIGTERM)
        code, _, stderr = server.bench.end()
        assert (code, "Traceback" in stderr) == (0, False), stderr


def unsent(ports: tuple[int, int]) -> int:
    """Bytes that the kernel holds for a client, by both ends of its connection."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (int(local[-4:], 16), int(remote[-4:], 16)) == ports:
            return int(queues.partition(":")[0], 16)
    return 0


def test_a_chat_is_refused_that_is_too_long_though_its_parts_are_not(bounded: Server) -> None:
    messages = [{"role": "user", "content": "hello world " * 20}] * 400
    status, body = bounded.post(CHAT, {"messages": messages})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert in_use(bounded) == 0


@pytest.mark.parametrize("by", gap.SIGNALS)
def test_an_engine_that_starts_while_its_server_is_ended_is_ended_too(
    monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    with (
        gap.signalled_at_each_start(monkeypatch, by) as began,
        pytest.raises(Interrupted),
        interruptible(),
        EngineProcess(ARM) as engine,
    ):
        engine.boot()
    assert began[0].poll() is not None
