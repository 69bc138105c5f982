"""Two replicas of a model, each with requests, a scheduler and a device of its own, that step together.

The first one is the engine that the harness knows: it gives every other request to the second, a process of
its own (replica_process.py), which sends its events to the harness by itself. Ahead of each step the two
agree on whether either has one (toggle sync-ranks). Where neither has, both sleep.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from engines.api import BadSetting, Cancel, EngineError, EngineOptions, Request, Submit
from engines.devices.base import RANK_LOST
from engines.overlap.toggles.sync_ranks import ATTEND, NOTHING, WORK, Agreement
from engines.processes import is_stopped

BOOT_S = 180.0
ANSWER_S = 30.0  # longer than a device waits for another one
BLAME_S = 3.0  # until whoever is at fault has said so, or is gone

DRAIN, BEGIN, GO_ON = "drain", "begin", "go on"  # orders
_LENGTH = struct.Struct("<I")  # in front of each message: its bytes


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """Whoever sends this has work, and is about to say so: wake up. `sleep`: the number of the sleep that it
    ends; one that comes after both have woken by themselves ends no later one."""

    sleep: int


class Order(msgspec.Struct, frozen=True, tag="order"):
    """From the first to the second."""

    what: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer to an order."""


class Up(msgspec.Struct, frozen=True, tag="up"):
    """The second can be given requests. `device`: its device's process, where it has one."""

    device: int | None


class Broke(msgspec.Struct, frozen=True, tag="broke"):
    """The second's last words."""

    message: str
    usage: bool


Message = Knock | Order | Done | Up | Broke


class ReplicaFailed(EngineError):
    """One of two replicas, which the message names."""

    names_process = True


class Link:
    """Small messages between the two, both ways; knocks are set aside as they come."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unread = b""
        self._heard: list[Message] = []
        self.knocked = -1  # the sleep that the last knock ended
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            self.closed = True
            raise EngineError(f"{RANK_LOST}: {error.strerror}") from error

    def read(self, timeout: float = 0) -> None:
        """What has come; waits so long for something to come."""
        if self.closed or not select.select([self._socket], [], [], timeout)[0]:
            return
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.closed = not data
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                break
            message: Message = msgspec.msgpack.decode(self._unread[_LENGTH.size : end], type=Message)
            self._unread = self._unread[end:]
            if isinstance(message, Knock):
                self.knocked = message.sleep
            else:
                self._heard.append(message)

    def take(self) -> Message | None:
        """The next message that was read; never a knock. Raises EngineError where nothing can come."""
        if self._heard:
            return self._heard.pop(0)
        if self.closed:
            raise EngineError(f"{RANK_LOST}: it is gone")
        return None

    def take_order(self) -> Order | None:
        """The next message that was read, if it is an order."""
        if self._heard and isinstance(self._heard[0], Order):
            return self._heard.pop(0)  # type: ignore[return-value]
        return None

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place: its number, the file in which all meet, and its link to the other one."""

    rank: int
    replicas: int
    store: str
    link: Link


class Meeting:
    """How a replica keeps step with the other one. On the scheduler's thread.

    Asleep, a replica says no word. Both fall asleep by the same word, NOTHING of both; the first to wake
    knocks, then says WORK; the other one wakes by the knock. `obey` carries out an order.
    """

    def __init__(self, agreement: Agreement, link: Link, obey: Callable[[str], None]) -> None:
        self._agree, self._link, self._obey = agreement.agree, link, obey
        self.asleep = True
        self._sleep = 0  # the number of this sleep, or of the next one

    def goes_on(self, work: bool) -> bool:
        """Whether either has a step to run; `work`: whether this one has."""
        if self.asleep and not self._wake(work):
            return False
        while (agreed := self._agree(WORK if work else NOTHING)) == ATTEND:
            self._attend()
        if agreed == NOTHING:
            self.asleep = True
            self._sleep += 1
        return agreed == WORK

    def ask(self, what: str) -> None:
        """On the first: have the other one carry out an order, and return once it has. Where it is awake it
        comes out of the agreement that it waits in, or comes to next, to do so."""
        attends = not self.asleep
        if attends:
            self._agree(ATTEND)
        self._link.send(Order(what))
        deadline = time.monotonic() + ANSWER_S
        while (answer := self._link.take()) is None:
            if self._knocked and not attends:  # it woke before the order came, and waits for a word
                attends = True
                self._agree(ATTEND)
            if time.monotonic() > deadline:
                raise EngineError(f"{RANK_LOST}: no answer to {what} in {ANSWER_S:.0f} s")
            self._link.read(0.1)
        if isinstance(answer, Broke):
            raise ReplicaFailed(f"replica 1: {answer.message}")
        if attends:
            self._link.send(Order(GO_ON))

    def serve(self) -> None:
        """On the second, asleep: carry out what was ordered."""
        self._link.read()
        while (order := self._link.take_order()) is not None:
            self._carry_out(order)

    def _wake(self, work: bool) -> bool:
        """The guard: the other one is woken before a word is said that it has to answer. An order that is
        read along the way is carried out: nobody would look for it before the next message."""
        self.serve()
        if work:
            self.knock()
        elif not self._knocked:
            if self._link.closed:
                raise EngineError(f"{RANK_LOST}: it is gone")
            return False
        self.asleep = False
        return True

    def knock(self) -> None:
        self._link.send(Knock(self._sleep))

    @property
    def _knocked(self) -> bool:
        return self.asleep and self._link.knocked >= self._sleep

    def _attend(self) -> None:
        """On the second, awake: carry out what is ordered until it may go on."""
        while True:
            order = self._link.take()
            if order is None:
                self._link.read(1.0)
            elif not self._carry_out(order):
                return

    def _carry_out(self, order: Message) -> bool:
        """Whether another one may follow."""
        assert isinstance(order, Order), order
        if order.what == GO_ON:
            return False
        self._obey(order.what)
        self._link.send(Done())
        return True


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the second replica is started with. `link` is a descriptor that it inherits; `inbox` is where its
    requests come."""

    options: EngineOptions
    toggles: dict[str, str]
    store: str
    link: int
    inbox: str
    events: str
    cores: str
    parent: int = msgspec.field(default_factory=os.getpid)


def count_replicas(toggles: Mapping[str, str], options: EngineOptions) -> int:
    """Raises BadSetting for what is no number of replicas, and for what they can't be combined with."""
    said = toggles.get("replicas", "1")
    if said not in ("1", "2"):
        raise BadSetting(f"replicas={said}: it is 1 or 2")
    if said == "2":
        if toggles.get("launch") == "thread":
            raise BadSetting("replicas=2 goes with launch=inline: the thread that agrees also launches")
        if toggles.get("ranks", "1") != "1":
            raise BadSetting("replicas=2 goes with ranks=1: a replica has one device")
        if options.tokenize_workers:
            raise BadSetting("replicas=2 goes with tokenize_workers=0: a scheduler wakes for the other one")
    return int(said)


class OtherReplica:
    """The second one, as the first has it. It boots while the first one does: call `wait_until_up` then."""

    def __init__(self, options: EngineOptions, toggles: dict[str, str], cores: str, events: str) -> None:
        import zmq

        self._store = os.memfd_create("replicas", os.MFD_CLOEXEC)
        store = f"/proc/{os.getpid()}/fd/{self._store}"
        mine, theirs = socket.socketpair()
        self.seat = Seat(0, 2, store, Link(mine))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PUSH)
        self._inbox.sndhwm = 0  # a step never waits for the other one to read
        inbox = f"ipc://@overlap-replica-{secrets.token_hex(8)}"  # no file: nobody has to remove it
        self._inbox.bind(inbox)
        self._given = 0
        self._device: int | None = None
        self._broke: Broke | None = None
        with theirs:
            config = ReplicaConfig(
                options=options,
                toggles=toggles,
                store=store,
                link=theirs.fileno(),
                inbox=inbox,
                events=events,
                cores=cores,
            )
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "engines.overlap.replica_process",
                    msgspec.json.encode(config).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to results
                pass_fds=[theirs.fileno()],
            )

    @property
    def pids(self) -> dict[str, int | None]:
        """By role."""
        return {"replica 1": self._process.pid, "device of replica 1": self._device}

    def wait_until_up(self) -> None:
        link, deadline = self.seat.link, time.monotonic() + BOOT_S
        while (up := link.take()) is None:
            if time.monotonic() > deadline:
                raise ReplicaFailed(f"{self} did not boot within {BOOT_S:.0f} s")
            link.read(0.1)
        if isinstance(up, Broke):
            self._broke = up
            raise self._failure() or EngineError(up.message)
        assert isinstance(up, Up)
        self._device = up.device

    def begin_round(self) -> None:
        """The first request of a round is the first replica's, so that it never has fewer than this one."""
        self._given = 0

    def takes(self, request: Request) -> bool:
        """Give it this request, where it is its turn."""
        self._given += 1
        if self._given % 2:
            return False
        self._inbox.send(msgspec.msgpack.encode(Submit(request)))
        return True

    def cancel(self, request: int) -> None:
        """Where it has it; else nothing happens."""
        self._inbox.send(msgspec.msgpack.encode(Cancel(request)))

    def blame(self, error: EngineError) -> EngineError:
        """Who is at fault where the first failed with `error`: itself, unless it waited in vain."""
        if isinstance(error, BadSetting | ReplicaFailed) or RANK_LOST not in str(error):
            return error
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline:
            failure = self._failure()
            if failure is not None:
                return failure
            time.sleep(0.02)
        for what, pid in (("", self._process.pid), ("the device of ", self._device)):
            if pid and is_stopped(pid):
                return ReplicaFailed(f"{what}replica 1 (pid {pid}) is stopped")
        return ReplicaFailed(f"{self} does not answer")

    def _failure(self) -> EngineError | None:
        """What it died of, if it did."""
        self.seat.link.read()
        while self._broke is None and self._said_something():
            pass
        if self._broke is not None:
            said = self._broke
            return BadSetting(said.message) if said.usage else ReplicaFailed(f"{self}: {said.message}")
        code = self._process.poll()
        if code is None:
            return None
        return ReplicaFailed(f"{self} died ({f'signal {-code}' if code < 0 else f'exit {code}'})")

    def _said_something(self) -> bool:
        try:
            message = self.seat.link.take()
        except EngineError:
            return False
        if isinstance(message, Broke):
            self._broke = message
        return message is not None

    def stop(self) -> None:
        """It has nothing that anybody needs any more, and its device dies with it."""
        self._process.kill()
        self._process.wait()
        self._context.destroy(linger=0)
        self.seat.link.close()
        os.close(self._store)

    def __str__(self) -> str:
        return f"replica 1 (pid {self._process.pid})"
