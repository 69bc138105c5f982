"""The engine behind a server: its own process, as in a run, and the events of each request.

A process of its own, because a server's work per chunk is Python too: in the engine's process it would take
the interpreter from the scheduler in the middle of a step. What crosses the border is what crosses it in a
run: requests with token ids one way, chunks of detokenized text the other, over ZeroMQ.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from time import monotonic
from types import TracebackType

import msgspec
import zmq

from engines import api
from harness.common import processes, temporary
from harness.common.processes import Child
from harness.common.signals import postponed, undisturbed
from harness.plan.design import Arm
from harness.run.hosts import (
    EXPLAIN_MS,
    ROLES,
    RunFailed,
    check_interpreter,
    check_none_stopped,
    environment,
)

GAUGES_S = 1.0  # for an engine to answer between two steps
LOOK_S = 60.0  # after so long a silence of an engine that starts, whether it is stopped


class HungUp(Exception):
    """The client is gone."""


class EngineLost(Exception):
    """Nothing more comes for a request, and that is not its own fault; the message says why."""


class Stream:
    """What the engine says of one request, as it comes."""

    def __init__(self, request: api.Request) -> None:
        self.request = request
        self._came = asyncio.Event()
        self._events: list[api.Event] = []
        self._hung_up = False
        self._lost = ""

    async def events(self) -> list[api.Event]:
        """What came since this was asked last, at least one; waits for it. Raises HungUp or EngineLost."""
        await self._came.wait()
        self._came.clear()
        if self._hung_up:
            raise HungUp
        if self._lost and not self._events:
            raise EngineLost(self._lost)
        if self._lost:
            self._came.set()
        events, self._events = self._events, []
        return events

    def put(self, event: api.Event) -> None:
        self._events.append(event)
        self._came.set()

    def hang_up(self) -> None:
        self._hung_up = True
        self._came.set()

    def lose(self, why: str) -> None:
        self._lost = why
        self._came.set()


class EngineProcess:
    """One engine, from its boot to its end. Use as a context manager; `boot`, then `attach` in an event loop,
    and all else in that."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self.failure = ""  # why it serves no more
        self._streams: dict[int, Stream] = {}
        self._numbers = count()
        self._asked: asyncio.Future[dict[str, int]] | None = None  # what it holds
        self._children: list[Child] = []
        self._booted = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_events = msgspec.msgpack.Decoder(list[api.Event]).decode
        self._decode_reply = msgspec.msgpack.Decoder(api.FromHost).decode

    def __enter__(self) -> EngineProcess:
        check_interpreter(self._arm)
        self._left = ExitStack()
        self._room = self._left.enter_context(temporary.for_sockets())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replies = self._bound("replies")
        self._events = self._bound("events")
        self._inbox = self._context.socket(zmq.PUSH)
        self._inbox.sndhwm = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with undisturbed():
            asked = self._booted and not self.failure
            if asked:
                self._say(api.Stop())
            processes.end(self._children, processes.GRACE_S if asked else 0)
            self._context.destroy(linger=0)
            self._left.close()

    def _bound(self, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.rcvhwm = 0  # an engine must never be held up by its server
        socket.bind(f"ipc://{self._room / name}")
        return socket

    # -- its life ------------------------------------------------------------------------------------------

    def boot(self) -> api.Description:
        """Start it and wait until it is ready. Raises BadSetting or RunFailed."""
        arm = self._arm
        config = api.HostConfig(
            name=arm.name,
            build=api.pick(arm.engine, api.find_engines(), "engine").build,
            options=arm.options,
            toggles=arm.toggles,
            inbox=f"ipc://{self._room / 'inbox'}",
            replies=f"ipc://{self._room / 'replies'}",
            events=f"ipc://{self._room / 'events'}",
        )
        command = [arm.python or sys.executable, "-m", "engines.host", msgspec.json.encode(config).decode()]
        with postponed():
            host = processes.start("engine host", command, environment(arm.env), self._room / "host.log")
            self._children.append(host)
        description = self._ready(host)
        self._inbox.connect(config.inbox)
        for role, pid in description.pids.items():
            if pid != host.pid:
                child = processes.adopt(ROLES.get(role, role), pid)
                if child is None:
                    raise RunFailed(f"the {ROLES.get(role, role)} (pid {pid}) died at once")
                self._children.append(child)
        self._booted = True
        return description

    def _ready(self, host: Child) -> api.Description:
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(host.pidfd, zmq.POLLIN)
        while not poller.poll(int(LOOK_S * 1e3)):  # a start may take any time
            check_none_stopped([host], LOOK_S)
        if not self._replies.poll(EXPLAIN_MS):
            raise RunFailed(self._obituary(None), host.output())
        match self._decode_reply(self._replies.recv()):
            case api.Ready(description=description):
                return description
            case api.Failed(message=message, usage=usage, traceback=traceback):
                if usage:
                    raise api.BadSetting(message)
                raise RunFailed(f"the engine failed: {message}", traceback)
        raise RunFailed("the engine's first message was not that it is ready")

    def attach(self) -> None:
        """Hear the engine in the running event loop, and of its death."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._events.fileno(), self._read_events)
        loop.add_reader(self._replies.fileno(), self._read_replies)
        self._read_events()  # the descriptor tells only of a socket that was read until empty
        self._read_replies()
        for child in self._children:
            loop.add_reader(child.pidfd, self._died, child)

    def _died(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        self._fail(None)

    def _fail(self, said: api.Failed | None) -> None:
        """It serves no more; every request is told why."""
        if self.failure:
            return
        deadline = monotonic() + EXPLAIN_MS / 1e3
        while said is None and self._replies.poll(max(0, int((deadline - monotonic()) * 1e3))):
            message = self._decode_reply(self._replies.recv())  # an answer to /metrics may lie before it
            said = message if isinstance(message, api.Failed) else None
        self.failure = self._obituary(said)
        sys.stderr.write(f"bench: {self.failure}\n")
        self.give_up(self.failure)

    def _obituary(self, said: api.Failed | None) -> str:
        """Which process died, and what is known of why. A host that was killed takes the others along; one
        that failed says which had died before, and then ends what it started."""
        dead = [child for child in self._children if child.ended()]
        killed = [child for child in dead if child.killed]
        told = None if said is None else [child for child in self._children if child.pid in said.died]
        others = [child for child in dead if child.popen is None] or dead
        culprit = next(iter(killed or (others if told is None else told)), None)
        who = "the engine failed" if culprit is None else culprit.obituary()
        why = "" if killed else said.message if said is not None else self._children[0].last_words()
        return f"{who}: {why}" if why else who

    def give_up(self, why: str) -> None:
        """Tell every request that nothing more comes."""
        for stream in self._streams.values():
            stream.lose(why)
        self._streams.clear()

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests that the engine has not ended, those without a client included."""
        return len(self._streams)

    def submit(self, request: api.Request) -> Stream:
        """Ask for it, under an id of its own. Only what went out is in flight: nobody would ever end the
        rest."""
        numbered = msgspec.structs.replace(request, id=next(self._numbers))
        self._say(api.Submit(numbered))
        stream = self._streams[numbered.id] = Stream(numbered)
        return stream

    def cancel(self, stream: Stream) -> None:
        """Its client is gone. It counts as in flight until the engine says that it ended."""
        if stream.request.id in self._streams and not self.failure:
            self._say(api.Cancel(stream.request.id))

    async def gauges(self) -> dict[str, int]:
        """What the engine holds right now; nothing where it does not answer. However many ask, it is asked
        once: it answers between two steps."""
        if self.failure:
            return {}
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._say(api.ReadGauges())
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), GAUGES_S)
        except TimeoutError:
            return {}

    def _say(self, message: api.ToHost) -> None:
        self._inbox.send(self._encode(message))

    # -- what it says --------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        """All that is there: the descriptor turns readable once, and not again for what was left."""
        while (message := _received(self._events)) is not None:
            self._deliver(self._decode_events(message))

    def _deliver(self, events: Sequence[api.Event]) -> None:
        for event in events:
            stream = self._streams.get(event.id)
            if stream is not None:
                stream.put(event)
                if not isinstance(event, api.Chunk):
                    del self._streams[event.id]

    def _read_replies(self) -> None:
        while (message := _received(self._replies)) is not None:
            match self._decode_reply(message):
                case api.Gauges(values=values) if self._asked is not None:
                    self._asked.set_result(values)
                    self._asked = None
                case api.Failed() as failed:
                    self._fail(failed)


def _received(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
