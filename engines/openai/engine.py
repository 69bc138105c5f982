"""A server behind the engine protocol: every request goes to it, every event comes from its replies."""

from __future__ import annotations

import gc
import os
import select
from collections import Counter, deque
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter_ns

from overlap_bench.engines import api, sockets
from overlap_bench.engines.openai import SPEC, endpoint, server
from overlap_bench.engines.openai.connections import Connections
from overlap_bench.engines.openai.counting import Tokens
from overlap_bench.engines.openai.endpoint import Endpoint, Model
from overlap_bench.engines.openai.replies import Outcome, Reply, outcome
from overlap_bench.engines.openai.requests import LIMITS, Wire
from overlap_bench.engines.openai.server import Server
from overlap_bench.engines.openai.turns import Processes, Turning
from overlap_bench.engines.pace import make_pace
from overlap_bench.engines.vllm import paced

# All else is the server's own affair, and stands in its command.
USED = ("model", "sampling", "recorder", "pace")
ASKED_FIRST = api.Request(0, "Hi", 1, stop_on_eos=True)
ALIVE_NS = 1_000_000_000  # between two signs of life to the load generator, which has a time-out of its own


class OpenAIEngine(api.Engine):
    """Requests go to `where`, or, where that is None, to the server that `command` starts."""

    connections: Connections  # since `start`

    def __init__(
        self,
        options: api.EngineOptions,
        toggles: Mapping[str, str],
        where: Endpoint | None,
        command: str,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.options, self.toggles = options, toggles
        self.where, self.command = where, command
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.server: Server | None = None
        self.ended: deque[Reply] = deque()  # not looked into yet
        self.counters: Counter[str] = Counter()
        self.in_flight = 0
        self.alive_ns = 0
        self.turning: Turning | None = None  # while turns last
        self.turned: Turning | None = None  # those of the round
        self.served = 0  # of the round
        self.failed = ""  # how the last one of the round failed

    def start(self, events: api.EventSink) -> api.Description:
        self.events = events
        self.key = endpoint.key()
        where = self.where or self._start_server().endpoint
        model = endpoint.model(where, self.options.model)
        self.wire = Wire(where, model.name, self.toggles["api"], self.toggles["count"], self.key)
        self.tokens = tokens_of(self.toggles.get("tokenizer"))
        sockets.allow_many()
        self.connections = Connections(where, self.timeout_s)
        self.wake_fd = self.connections.epoll.fileno()
        self._learn_limit()
        if self.server is not None:
            self.connections.epoll.register(self.server.pidfd, select.EPOLLIN)
        return self._described(model)

    def _start_server(self) -> Server:
        """The server that the command starts, once it is ready."""
        pace = self.options.pace
        with NamedTemporaryFile(prefix="bench-paced-") as started:
            variables = {**paced.environment(pace), paced.STARTED: started.name} if pace else {}
            self.server = server.start(self.command, variables)
            self.server.wait_until_ready(self.start_timeout_s)
            if pace and not started.read():
                raise api.BadSetting(
                    f"the server did not take the pace: only vLLM does, and only where its interpreter finds "
                    f"overlap-bench; cmd was {self.command}"
                )
        return self.server

    def _learn_limit(self) -> None:
        """By which of LIMITS the server is told how many tokens are wanted: some refuse one of them. It is
        asked before any round, so that no request of one is sent twice."""
        if self._names_a_limit():
            self.wire.limit = LIMITS[1]
            if self._names_a_limit():
                self.wire.limit = LIMITS[0]  # the requests will tell what it said

    def _names_a_limit(self) -> bool:
        """Whether the server refuses a request with words about one of LIMITS."""
        reply = Reply(ASKED_FIRST.id, perf_counter_ns())
        self.connections.ask(reply, self.wire.bytes_of(ASKED_FIRST))
        while not self.connections.turn():
            select.select([self.connections.epoll], [], [], self.connections.wait_s())
        self.connections.close_idle()
        said = b"".join(reply.pieces)
        refused = isinstance(outcome(reply).events[-1], api.Error)
        return refused and any(name.encode() in said for name in LIMITS)

    def _described(self, model: Model) -> api.Description:
        pids = {"engine": os.getpid()}
        if self.server is not None:
            pids["server"] = self.server.popen.pid
        tokenizer = self.toggles.get("tokenizer")
        pace = self.options.pace
        kind = f"paced: {make_pace(pace).name}" if pace else "remote"
        return api.Description(
            engine="openai",
            versions={"httptools": version("httptools")},
            device={
                "kind": kind,
                "name": self.where.url if self.where is not None else self.command,
                **({"replaced": paced.REPLACED} if pace else {}),
            },
            model={
                "name": model.name,
                "vocabulary": 0,
                "context": model.context,
                **({"tokenizer": tokenizer} if tokenizer else {}),
            },
            toggles=dict(self.toggles),
            deterministic=False,  # a server's batches are its own affair
            pids=pids,
            takes_turns=self.server is not None
            and Processes(self.server.popen.pid).listen_on(self.server.endpoint.port),
        )

    def submit(self, request: api.Request) -> None:
        reply = Reply(request.id, perf_counter_ns())
        if not isinstance(request.prompt, str):
            reply.prompt_tokens = len(request.prompt)
        try:
            content = self.wire.bytes_of(request)
        except api.BadSetting as error:
            self.events.send([api.Error(request.id, str(error))])
            return
        self.in_flight += 1
        self.connections.ask(reply, content)

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(self._patience()):
            if self.turning is None:
                self._look()
            else:
                self._step(self.turning)

    def _patience(self) -> float | None:
        """How long may be waited for a message, or for the server."""
        if self.turning is not None:
            return 0 if self.in_flight else None
        return 0 if self.ended else self.connections.wait_s()

    def _look(self) -> None:
        """Reading comes first: ended replies are parsed one at a time, between two looks at the sockets."""
        self.ended += self.connections.turn()
        if self.ended:
            self._finish(self.ended.popleft())
        self._check()
        self._say_alive()

    def _say_alive(self) -> None:
        """Replies are parsed when they have ended, and until then there may be nothing to send."""
        if self.in_flight and perf_counter_ns() >= self.alive_ns:
            self.alive_ns = perf_counter_ns() + ALIVE_NS
            self.events.send([])

    def _check(self) -> None:
        if self.server is not None and self.server.ended():
            raise self.server.failure("in the middle of a round" if self.in_flight else "between two rounds")

    def _step(self, turning: Turning) -> None:
        """Until one more step is over, or all replies have ended; nothing is parsed meanwhile."""
        self._check()  # before what is left of a server that ended goes on, out of its turn
        if turning.begin_step(self.connections.replies):
            self.connections.expect_anew()
        while not turning.step_is_over and self.connections.replies:
            select.select([self.connections.epoll], [], [], self.connections.wait_s())
            self._read(turning)
            self._check()
            self._say_alive()
        if not self.connections.replies:
            self._finish_all()

    def _read(self, turning: Turning) -> None:
        ended = self.connections.turn()
        turning.read(self.connections.replies, ended)
        self.ended += ended

    def _finish_all(self) -> None:
        while self.ended:
            self._finish(self.ended.popleft())

    def begin_turns(self) -> None:
        assert self.server is not None
        self.connections.close_idle()
        self.turning = self.turned = Turning(self.server.popen.pid)

    def drain(self) -> None:
        """The server goes on from where it is stopped: what is under way is the next turn's."""
        assert self.turning is not None
        self.turning.park()
        self._read(self.turning)
        self._finish_all()

    def end_turns(self) -> None:
        assert self.turning is not None
        self.turning.end()
        self.turning = None

    def _finish(self, reply: Reply) -> None:
        self.in_flight -= 1
        found = outcome(reply, self.tokens)
        self._count(found)
        events = [self._without_key(event) for event in found.events]
        if self.turning is not None:
            self.turning.finished([each for each in events if isinstance(each, api.Chunk)], found)
        if isinstance(events[-1], api.Error):
            self.failed = events[-1].message
        else:
            self.served += 1
        self.events.send(events)

    def _without_key(self, event: api.Event) -> api.Event:
        """A server may repeat the key in an error, and errors are stored."""
        if isinstance(event, api.Error) and self.key:
            return api.Error(event.id, event.message.replace(self.key, "..."))
        return event

    def _count(self, found: Outcome) -> None:
        if not found.counted_by:
            return
        self.counters[f"requests_counted_by_{found.counted_by}"] += 1
        self.counters["chunks"] += len(found.events) - 1
        self.counters["chunks_read_together"] += found.read_together
        if found.pace != "streamed":
            self.counters[f"replies_{found.pace.replace(' ', '_')}"] += 1
        if found.hidden:
            self.counters["tokens_not_streamed"] += found.hidden
            self.counters["requests_not_all_streamed"] += 1
        self.counters["requests_of_doubtful_count"] += found.doubtful

    def begin_round(self) -> None:
        self.counters.clear()
        self.served, self.failed = 0, ""
        self.turned = None
        self.connections.opened = 0
        self.connections.clock.renew()
        gc.collect()
        gc.disable()  # until the round is over: a collection takes milliseconds

    def collect(self) -> api.RoundRecord:
        """Raises EngineError where a server of our own served nothing: its output, which says why, would be
        lost with it; and where it went on while it was stopped."""
        gc.enable()
        if self.server is not None and self.failed and not self.served:
            raise self.server.failure("served no request", self.failed)
        if self.turned is not None and self.turned.ran_on:
            raise api.EngineError(
                "the server went on while it was stopped for another arm's turn, as where its command only "
                "forwards to another machine; --interleaved-rounds 0 compares by rounds"
            )
        counters = dict(self.counters)
        counters["connections_opened"] = self.connections.opened
        counters["clock_moved_us"] = self.connections.clock.moved_ns() // 1000
        steps = None if self.turned is None else self.turned.table()
        return api.RoundRecord(steps=steps, counters=counters)

    def stop(self) -> None:
        gc.enable()  # a round that was broken off left it disabled
        if self.turning is not None:
            self.turning.end()  # a process that is stopped takes no SIGTERM
        if hasattr(self, "connections"):
            self.connections.close()
        if self.server is not None:
            self.server.stop()


def tokens_of(path: str | None) -> Tokens | None:
    """Counts the tokens of a text by a tokenizer.json. Raises BadFile where it is none."""
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
    except ImportError:
        raise api.BadSetting("tokenizer= needs the package tokenizers: pip install tokenizers") from None
    except Exception as error:  # the library raises nothing narrower
        raise api.BadFile(f"cannot read the tokenizer {path}: {api.first_line(error)}") from None

    def encoded(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    # Llama 2's puts a space before each text: a chunk that brings its own would have a token too many. Where
    # a space is a token of its own, "a" is one as it stands, and none is put before it.
    alone = tokenizer.encode("a", add_special_tokens=False).tokens
    prepends = alone != ["a"] and encoded(" a") > len(alone)

    def count(text: str) -> int:
        return encoded(text[1:] if prepends and text[1:] and text[0] == " " else text)

    return count


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> OpenAIEngine:
    """Raises BadSetting where the settings make no sense."""
    options.refuse_unused(SPEC.name, USED)
    url = toggles.get("url")
    if url is not None and options.pace:
        raise api.BadSetting("a server at an address has a device of its own: leave pace out, or give cmd=")
    tokenizer = toggles.get("tokenizer")
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise api.BadFile(f"tokenizer={tokenizer}: there is no such file")
    return OpenAIEngine(
        options,
        toggles,
        None if url is None else endpoint.parse(url),
        toggles.get("cmd", ""),
        seconds("timeout_s", toggles),
        seconds("start_timeout_s", toggles),
    )


def seconds(name: str, toggles: Mapping[str, str]) -> float:
    """A setting that is a time. Raises BadSetting."""
    try:
        value = float(toggles[name])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise api.BadSetting(f"{name} must be a number of seconds above 0, not {toggles[name]}")
    return value
