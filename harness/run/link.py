"""The processes of a run and what they say: starting one, and waiting for a word while watching that every
process lives. Whoever died, hangs or failed is named in the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import zmq

from overlap_bench.engines import api
from overlap_bench.harness.common import processes, temporary
from overlap_bench.harness.common.processes import Child
from overlap_bench.harness.common.signals import postponed, undisturbed
from overlap_bench.harness.run import messages
from overlap_bench.harness.run.hosts import EXPLAIN_MS, RunFailed, check_none_stopped, host_role

GONE_MS = 3000  # how long a killed host may take to be gone, which on a card frees gigabytes
BUILT = (
    "; a ref's tree has nothing that a build makes: name such files of your checkout by --overlay, or "
    "install each ref into an interpreter of its own"
)


class Link:
    """Processes and sockets of one run. Use as a context manager: everything it started is gone when it is
    left, however it is left. `worktrees`: by the arm's name, the folder whose code it runs in place of what
    is installed."""

    def __init__(self, worktrees: Mapping[str, Path]) -> None:
        self._worktrees = worktrees
        self._alive: list[Child] = []
        self._failed: set[str] = set()  # roles of hosts that said so, and are stopping their engines
        self._generator: Child | None = None
        self._loaded: tuple[str, Child] | None = None  # the arm of the latest round, and its host
        self._turning: set[str] = set()  # arms that take turns, and have not said that they wait too long
        self._parked: set[int] = set()  # servers that stand still between their turns

    def __enter__(self) -> Self:
        self._left = ExitStack()
        self._room = self._left.enter_context(temporary.for_sockets())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._from_hosts = self._bound("hosts")
        self._from_load = self._bound("load")
        self._poller = zmq.Poller()
        self._poller.register(self._from_hosts, zmq.POLLIN)
        self._poller.register(self._from_load, zmq.POLLIN)
        self._to_load = self._socket(zmq.PUSH)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what lives and remove the sockets; an engine that told of its failure has seconds to stop."""
        with undisturbed():
            processes.wait([child for child in self._alive if child.role in self._failed], processes.GRACE_S)
            processes.end(self._alive)
            self._alive = []
            self._context.destroy(linger=0)
            self._left.close()

    def _start(self, role: str, command: Sequence[str], environment: Mapping[str, str], stem: str) -> Child:
        with postponed():
            child = processes.start(role, command, environment, self._room / f"{stem}.log")
            self._watch(child)
        return child

    def _watch(self, child: Child) -> None:
        self._alive.append(child)
        self._poller.register(child.pidfd, zmq.POLLIN)

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._room / name}"

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """pyzmq tells the context of a socket a moment after it is there. Were a signal raised between the
        two, `close` would wait for that socket without end."""
        with postponed():
            return self._context.socket(kind)

    def _bound(self, name: str) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.PULL)
        socket.rcvhwm = 0
        socket.bind(self._endpoint(name))
        return socket

    def _heard(self) -> api.FromHost:
        """The next message of a host. Raises RunFailed for one that is not as engines/api says: what an
        engine made is looked at here, not in its own process."""
        message = self._from_hosts.recv()
        try:
            heard: api.FromHost = msgspec.msgpack.decode(message, type=api.FromHost)
        except msgspec.ValidationError as error:
            said = msgspec.msgpack.decode(message)
            raise RunFailed(f"the engine of {said['name']} broke engines/api: {error}") from None
        return heard

    def _wait(self, wanted: zmq.Socket[bytes], seconds: float | None = None, silence: str = "") -> None:
        """Block until `wanted` has a message. A death, or an engine that says Failed, raises; so does silence
        for `seconds`, with the message `silence`, which has a place for them; where that is "", silence is an
        error only if one of the processes is stopped, as by SIGSTOP: it would go on for ever."""
        while True:
            ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1e3)))
            if wanted in ready:
                return
            if not ready and seconds is not None:
                check_none_stopped(self._alive, seconds)
                if silence:
                    raise RunFailed(silence.format(f"{seconds:g} s"))
            if self._from_hosts in ready:  # nothing is expected of a host now, so this is a failure
                message = self._heard()
                if isinstance(message, api.Failed):
                    raise self._failure(message)
                if isinstance(message, api.Waiting):
                    self._raise_if_kept(message)
            self._raise_if_dead()

    def _raise_if_kept(self, message: api.Waiting) -> None:
        """All arms but the one that has the baton come to wait for it at last, some a little later."""
        again = message.name not in self._turning
        self._turning.discard(message.name)
        if not self._turning:
            raise RunFailed(
                f"every engine has waited for its turn for {message.seconds:g} s: none of them has the turn"
            )
        if len(self._turning) == 1 and (again or not self._from_hosts.poll(EXPLAIN_MS)):
            raise RunFailed(
                f"the engine of {next(iter(self._turning))} hangs: it has not ended its turn in "
                f"{message.seconds:g} s"
            )

    def _raise_load_failure(self, message: messages.LoadFailed) -> NoReturn:
        """Raise what the load generator says of the engine, with the last line that its host printed. The
        engine's own failure or death, which may show a moment later, goes first; that the load generator ends
        after its last word is no death to report."""
        others = [child for child in self._alive if child is not self._generator]
        self._await_news(others, EXPLAIN_MS)
        self._raise_if_explained(0)
        self._raise_if_dead(others)
        self._raise_if_stopped(message.message)
        if self._loaded is None:
            raise RunFailed(f"the load generator gave up: {message.message}", message.traceback)
        arm, host = self._loaded
        said = host.last_words()
        printed = f"; its host last printed: {said}" if said else ""
        raise RunFailed(
            f"the load generator gave up on {arm}: {message.message}{printed}",
            f"{message.traceback}\n{host.output()}",
        )

    def _raise_if_dead(self, among: Sequence[Child] | None = None) -> None:
        """Name the process that died. A host that was killed takes what its engine started along, so it is
        named first; else that is named before its host, which may have ended because of it. Where no signal
        killed what was started here, an engine may still say what it knows."""
        watched = self._alive if among is None else among
        dead = [child for child in watched if child.ended()]
        if not dead:
            return
        hosts = [child for child in watched if child.popen is not None and child is not self._generator]
        adopted = any(child.popen is None for child in dead)
        if adopted and not any(child.killed for child in dead) and not any(host in dead for host in hosts):
            # The kernel ends what a killed host started before it tells of the host itself.
            self._await_news(hosts, GONE_MS)
            dead = [child for child in watched if child.ended()]
        by_signal = [child for child in dead if child.killed]
        child = (by_signal or [each for each in dead if each.popen is None] or dead)[0]
        if child is self._generator and not by_signal and self._from_load.poll(EXPLAIN_MS):
            word = msgspec.msgpack.decode(self._from_load.recv(), type=messages.FromLoad)
            if isinstance(word, messages.LoadFailed):
                self._raise_load_failure(word)
        if not by_signal:
            self._raise_if_explained()
            self._raise_if_stopped(child.obituary())
        obituary, said = child.obituary(), child.last_words()
        if "ModuleNotFoundError" in said:
            raise api.BadSetting(f"the interpreter of the {child.role} lacks a package: {said}")
        raise RunFailed(f"{obituary}: {said}" if said else obituary, child.output())

    def _raise_if_stopped(self, seen: str) -> None:
        """Name a process that somebody stopped where its engine says nothing: whoever ended of waiting for
        it, or gave it up, is not at fault."""
        if stopped := processes.stopped(self._alive, self._parked):
            raise RunFailed(f"{stopped} is stopped, as by SIGSTOP; seen by this: {seen}")

    def _await_news(self, children: Sequence[Child], patience_ms: int) -> None:
        """Until a host says something or one of these processes has ended."""
        news = zmq.Poller()
        for each in (self._from_hosts, *(child.pidfd for child in children)):
            news.register(each, zmq.POLLIN)
        news.poll(patience_ms)

    def _raise_if_explained(self, patience_ms: int = EXPLAIN_MS) -> None:
        """A host that fails says why and ends; which of the two is seen first is chance."""
        until = monotonic() + patience_ms / 1e3
        while self._from_hosts.poll(max(0, round(1e3 * (until - monotonic())))):
            message = self._heard()  # another word of it may lie before
            if isinstance(message, api.Failed):
                raise self._failure(message)

    def _failure(self, message: api.Failed) -> Exception:
        self._failed.add(host_role(message.name))
        if message.usage:
            lacks = "can't run the engine of" in message.message and message.name in self._worktrees
            return api.BadSetting(message.message + BUILT * lacks)
        gone = [child for child in self._alive if child.pid in message.died]
        who = gone[0].obituary() if gone else f"the engine of {message.name} failed"
        return RunFailed(f"{who}: {message.message}", message.traceback)
