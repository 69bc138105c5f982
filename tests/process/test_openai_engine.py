"""The openai engine against a small server on this machine, well-behaved and not: sockets are real."""

import gc
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from overlap_bench.engines import api
from overlap_bench.engines.openai import SPEC, endpoint, engine
from overlap_bench.engines.openai import server as run_server
from overlap_bench.engines.openai.endpoint import Endpoint
from tests.support.bench_command import PATIENCE_S
from tests.support.in_process_engine import Collected
from tests.support.refusals import refusal
from tests.support.small_server import SmallServer, running

KEY = "sk-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    with running() as server:
        yield server


@contextmanager
def started(url: str, *, model: str = "", **settings: str) -> Iterator[tuple[api.Engine, Collected]]:
    full = SPEC.check({"url": url, **settings})
    built = engine.build(api.EngineOptions(model=model), full)
    sink = Collected()
    try:
        built.start(sink)
        built.begin_round()
        yield built, sink
    finally:
        built.stop()


def serve(built: api.Engine, sink: Collected, requests: Sequence[api.Request]) -> list[api.Event]:
    """All events of these requests, which are submitted at once."""
    sink.events.clear()
    sink.ended = 0
    for request in requests:
        built.submit(request)
    deadline = time.monotonic() + PATIENCE_S

    def pump(timeout: float | None) -> bool:
        assert time.monotonic() < deadline, "it hangs"
        if sink.ended < len(requests):
            time.sleep(min(timeout or 0, 0.001))
        return sink.ended < len(requests)

    built.run(pump)
    return list(sink.events)


def ask(url: str, *prompts: str, **settings: str) -> list[api.Event]:
    with started(url, **settings) as (built, sink):
        return serve(built, sink, [api.Request(index, prompt, 4) for index, prompt in enumerate(prompts)])


def url(server: SmallServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def failure(events: list[api.Event]) -> str:
    (found,) = events
    assert isinstance(found, api.Error), found
    return found.message


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_request_is_served_with_stamps_of_its_own(server: SmallServer, kind: str) -> None:
    before = time.perf_counter_ns()
    *chunks, finish = ask(url(server), "Hello", api=kind)
    assert isinstance(finish, api.Finish)
    assert [chunk.text for chunk in chunks] == ["One", " two", " three", " four"]  # type: ignore[union-attr]
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 1, 4)
    stamps = [finish.sent_ns, *(chunk.arrived_ns for chunk in chunks), finish.arrived_ns]  # type: ignore[union-attr]
    assert stamps == sorted(stamps)
    assert before < finish.accepted_ns < finish.sent_ns <= finish.submitted_ns
    assert all(chunk.lag_ns >= 0 for chunk in chunks)  # type: ignore[union-attr]
    assert server.asked[-1].body["model"] == "small"
    assert server.asked[-1].path == f"/v1/{'chat/' if kind == 'chat' else ''}completions"


def test_bytes_that_lie_unread_have_arrived_all_the_same() -> None:
    with running(gap_s=0) as server, started(url(server)) as (built, sink):
        serve(built, sink, [api.Request(0, "Hello", 1)])  # a connection that stands
        built.submit(api.Request(0, "Hello", 1))
        assert select.select([built.wake_fd], [], [], PATIENCE_S)[0]
        while server.replying:  # what wakes may be the first bytes alone
            time.sleep(0.001)
        now = time.perf_counter_ns()
        sink.ended = 0
        sink.events.clear()
        built.run(lambda timeout: not sink.ended)
        chunk, finish = sink.events
        assert isinstance(chunk, api.Chunk)
        assert isinstance(finish, api.Finish)
        assert finish.sent_ns < chunk.arrived_ns < now
        assert chunk.lag_ns > now - chunk.arrived_ns > 0


def test_connections_are_kept_and_used_again(server: SmallServer) -> None:
    asked = len(server.asked)
    with started(url(server)) as (built, sink):
        for _ in range(3):
            events = serve(built, sink, [api.Request(index, "Hello", 2) for index in range(4)])
            assert sum(isinstance(event, api.Finish) for event in events) == 4
        counters = built.collect().counters
    assert counters["connections_opened"] == 4
    assert counters["requests_counted_by_usage"] == 12
    assert counters["chunks"] == 24
    assert len({each.connection for each in server.asked[asked:]}) == 4


@pytest.mark.parametrize("prompt", ["close", "close after it"])
def test_a_reply_may_end_with_its_connection(server: SmallServer, prompt: str) -> None:
    with started(url(server)) as (built, sink):
        for _ in range(2):
            *chunks, finish = serve(built, sink, [api.Request(0, prompt, 3)])
            assert isinstance(finish, api.Finish)
            assert sum(each.tokens or 0 for each in chunks if isinstance(each, api.Chunk)) == 3


BAD = [
    ("refuse", "HTTP 400: unknown field: ignore_eos; --stop-on-eos leaves ignore_eos out"),
    (
        "refuse as transformers does",
        "HTTP 422: Unexpected fields in the request: {'ignore_eos'}; --stop-on-eos leaves ignore_eos out",
    ),
    ("break", "HTTP 500: out of memory"),
    ("page", "the reply is not an event stream: its type is application/json"),
    ("hang up", "the server closed the connection without a reply"),
    ("no http", "the reply is not HTTP: "),
    ("cut", "the stream was cut short: the server closed the connection"),
    ("cut in a chunk", "the stream was cut short: the server closed the connection"),
    ("stop short", "the stream ended too early: no finish reason, and no [DONE]"),
    ("malformed", "chunk 2 of the stream is malformed: "),
    ("error in the stream", "the server sent an error in the stream: the engine died"),
]


def test_every_bad_reply_is_a_failed_request_and_the_others_are_served(server: SmallServer) -> None:
    asked = len(server.asked)
    prompts = [prompt for bad, _ in BAD for prompt in (bad, "Hello")]
    events = ask(url(server), *prompts)
    ends = {event.id: event for event in events if not isinstance(event, api.Chunk)}
    for number, (prompt, message) in enumerate(BAD):
        found = ends[2 * number]
        assert isinstance(found, api.Error), prompt
        assert found.message.startswith(message), prompt
        assert isinstance(ends[2 * number + 1], api.Finish), f"beside {prompt}"
    assert len(server.asked) - asked == len(prompts)  # nothing was sent twice


@pytest.mark.parametrize("prompt", ["silence", "comments"])
def test_a_request_on_which_nothing_comes_times_out(server: SmallServer, prompt: str) -> None:
    assert failure(ask(url(server), prompt, timeout_s="1")) == "timed out: nothing came for 1 s"


@pytest.mark.parametrize("unknown", ["max_tokens", "max_completion_tokens"])
def test_a_server_is_told_how_many_tokens_are_wanted_by_the_name_that_it_knows(unknown: str) -> None:
    with running(unknown=unknown) as server:
        *chunks, finish = ask(url(server), "Hello", api="chat")
        (asked,) = server.asked  # no request of a round was sent twice
    assert isinstance(finish, api.Finish)
    assert len(chunks) == finish.completion_tokens == 4
    assert unknown not in asked.body


def test_a_server_that_is_not_there(server: SmallServer) -> None:
    with socket.socket() as nobody:  # bound, and it does not listen
        nobody.bind(("127.0.0.1", 0))
        there = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(api.EngineError, match=f"no server at {there}/v1: connection refused"):
            ask(there, "Hello")
        with started(there, model="small") as (built, sink):
            message = failure(serve(built, sink, [api.Request(0, "Hello", 1)]))
        assert message == f"no server at {there}/v1: connection refused"


def test_the_key_is_sent_and_never_told(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    message = failure(ask(url(server), "tell the key"))
    assert server.asked[-1].headers["authorization"] == f"Bearer {KEY}"
    assert message == "HTTP 401: no such key: Bearer ..."


def test_a_key_that_no_header_can_hold_is_refused_and_not_told(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\r\nother")
    assert "sk-secret" not in refusal(lambda: ask(url(server), "Hello"))


def test_a_server_that_wants_a_key_says_so(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "get", lambda *asked: (401, b"{}"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(api.EngineError, match="wants a key: GET /v1/models gives HTTP 401; give one in OPEN"):
        ask(url(server), "Hello")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(api.EngineError, match="refuses the key: "):
        ask(url(server), "Hello")
    with started(url(server), model="small") as (built, sink):  # it may hide its list and serve all the same
        assert isinstance(serve(built, sink, [api.Request(0, "Hello", 1)])[-1], api.Finish)


@pytest.mark.parametrize(
    ("health", "asked"),
    [
        # llama.cpp lists its model while it loads; SGLang answers 503 until it has warmed up.
        ([503, 503, 200], ["/health"] * 3),
        ([404], ["/health", "/v1/models"]),
    ],
)
def test_a_server_is_ready_when_its_health_says_so_or_without_any_when_it_lists_its_models(
    health: list[int], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(health)
    found: list[str] = []

    def get(where: Endpoint, path: str, seconds: float) -> tuple[int, bytes]:
        found.append(path)
        return (next(answers) if path == "/health" else 200), b""

    monkeypatch.setattr(endpoint, "get", get)
    started = run_server.start("sleep 60 {port}", {})
    try:
        started.wait_until_ready(PATIENCE_S)
    finally:
        started.stop()
    assert found == asked


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1 that nobody vouches for, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=small "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {folder / 'key'} -out {folder / 'certificate'}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    both = folder / "both"
    both.write_text((folder / "key").read_text() + (folder / "certificate").read_text())
    return both


def test_tls_is_verified(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with running(tls=context) as secured:
        there = f"https://127.0.0.1:{secured.port}"
        with pytest.raises(api.EngineError, match=r"TLS: the certificate can't be verified: self.signed"):
            ask(there, "Hello")
        with started(there, model="small") as (built, sink):
            message = failure(serve(built, sink, [api.Request(0, "Hello", 1)]))
        assert message.startswith("TLS: the certificate can't be verified: self")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with started(there) as (built, sink):
            for _ in range(2):
                *chunks, finish = serve(built, sink, [api.Request(0, "Hello", 3)])
                assert isinstance(finish, api.Finish)
                assert [chunk.lag_ns >= 0 for chunk in chunks] == [True] * 3  # type: ignore[union-attr]
            assert built.collect().counters["connections_opened"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "is not a server's address"),
        ({"url": "http://127.0.0.1:port"}, "is not a server's address: Port could not be cast"),
        ({"url": "http://[::1"}, "is not a server's address: Invalid IPv6 URL"),
        ({"url": "http://my..host:8000"}, "no host is called my..host; between its dots"),
        ({"url": f"http://{'a' * 64}.com"}, "no host is called aaa"),
        ({"url": "http://my host"}, "no host is called my host"),
        ({"url": "http://127.0.0.1/für/v1"}, "has a path that no request can hold: percent-encode"),
        ({"url": "http://127.0.0.1/two words"}, "has a path that no request can hold"),
        ({"url": "http://me:word@127.0.0.1"}, "would be stored"),
        ({"url": "http://127.0.0.1/v1?key=word"}, "^(?!.*word).* would not be sent: leave it out"),
        ({"url": "http://127.0.0.1/v1#part"}, "would not be sent: leave it out"),
        ({"url": "http://127.0.0.1:0"}, "names port 0, at which no server listens"),
        ({"url": "http://127.0.0.1/v1/chat/completions"}, "api=completions or chat"),
        ({"timeout_s": "soon"}, "timeout_s must be a number of seconds above 0, not soon"),
        ({"tokenizer": "/nowhere"}, "tokenizer=/nowhere: there is no such file"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(api.BadSetting, match=message):
        engine.build(api.EngineOptions(model=""), SPEC.check({"url": "http://127.0.0.1", **settings}))


def test_what_only_the_servers_command_can_set_is_refused() -> None:
    used = api.EngineOptions(model="m", sampling=True, recorder=False)
    settings = SPEC.check({"url": "http://127.0.0.1"})
    engine.build(used, settings)
    for changed, message in (
        ({"dtype": "bfloat16"}, "engine openai has no dtype: leave it out"),
        ({"pace": "5ms"}, "a server at an address has a device of its own: leave pace out"),
    ):
        with pytest.raises(api.BadSetting, match=message):
            engine.build(msgspec.structs.replace(used, **changed), settings)


def test_a_round_that_is_broken_off_leaves_the_collector_on(server: SmallServer) -> None:
    with started(url(server)):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_kept_connection_goes_by_the_clock_of_the_round(server: SmallServer) -> None:
    with started(url(server)) as (built, sink):
        serve(built, sink, [api.Request(0, "Hello", 2)])
        connections = built.connections  # type: ignore[attr-defined]
        connections.clock.offset_ns += 50_000_000  # as if the time of day had been set back since
        assert built.collect().counters["clock_moved_us"] > 40_000
        built.begin_round()
        *chunks, finish = serve(built, sink, [api.Request(0, "Hello", 2)])
        assert connections.opened == 0
    assert isinstance(finish, api.Finish)
    assert all(chunk.arrived_ns > finish.sent_ns for chunk in chunks)  # type: ignore[union-attr]


def test_the_host_needs_no_torch() -> None:
    code = "import sys, engines.host, engines.openai.engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_server_that_did_not_take_the_pace_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "healthy.py"
    script.write_text(
        "import sys\nfrom http.server import *\n"
        "class Healthy(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n        self.end_headers()\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), Healthy).serve_forever()\n"
    )
    toggles = SPEC.check({"cmd": f"{sys.executable} {script} {{port}}"})
    built = engine.build(api.EngineOptions(model="", pace="5ms"), toggles)
    with pytest.raises(api.BadSetting, match=r"^the server did not take the pace"):
        built.start(Collected())
    built.stop()
