"""The process an engine runs in: `python -m overlap_bench.engines.host CONFIG` (a HostConfig as JSON).

Light imports: the heavy ones come with the engine's own `build`. The host owns the engine's main thread,
reads its inbox inside `pump`, and dies with the harness that started it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import msgspec
import zmq

from overlap_bench.engines import api
from overlap_bench.engines.baton import Turns
from overlap_bench.engines.processes import die_with_parent, end_session
from overlap_bench.engines.shortages import shortage
from overlap_bench.old_names import hint

NOTICE_S = 0.2  # how much later than the engine the kernel may report that a process has ended


class Sink:
    """Sends events to the harness; one call is one message (msgpack list of tagged arrays)."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.address = address
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0  # never drop or block: a step must not wait for a slow client
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, events: Sequence[api.Event]) -> None:
        self._socket.send(self._encode(events))


class Host:
    """Joins one engine to the harness."""

    def __init__(self, config: api.HostConfig) -> None:
        self.config = config
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.rcvhwm = 0
        self.inbox.bind(config.inbox)
        self.replies = self.context.socket(zmq.PUSH)
        self.replies.connect(config.replies)
        self.poller = zmq.Poller()
        self.poller.register(self.inbox, zmq.POLLIN)
        self.parent = os.pidfd_open(config.parent)
        self.poller.register(self.parent, zmq.POLLIN)
        self.turns: Turns | None = None  # since the harness began them
        self.turning = False  # until it ends them
        self._parking = zmq.Poller()  # no wake_fd: what would wake the engine waits until it has the baton
        if config.baton:
            self._baton = os.open(config.baton, os.O_RDWR | os.O_NONBLOCK)
            for each in (self.inbox, self.parent, self._baton):
                self._parking.register(each, zmq.POLLIN)
        self.stopped = False
        self.pidfds: dict[int, int] = {}  # of the engine's other processes
        self.failed = False  # and has said so
        self._decode = msgspec.msgpack.Decoder(api.ToHost).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self) -> None:
        """Start the engine, run it until told to stop, end it."""
        engine = build_engine(self.config)
        try:
            self._serve(engine)
        except BaseException as error:
            if isinstance(error, Exception):  # an engine may leave by sys.exit; what it started must end too
                self.report(error)
            with suppress(Exception):  # half started, `stop` may well fail or hang: so tell first
                engine.stop()
            raise
        engine.stop()

    def _serve(self, engine: api.Engine) -> None:
        description = engine.start(Sink(self.config.events, self.context))
        if engine.wake_fd is not None:
            self.poller.register(engine.wake_fd, zmq.POLLIN)
        self.reply(api.Ready(self.config.name, description, origin(engine)))
        for pid in set(description.pids.values()) - {os.getpid()}:
            with suppress(OSError):
                self.pidfds[pid] = os.pidfd_open(pid)
                self._parking.register(self.pidfds[pid], zmq.POLLIN)
        engine.run(lambda timeout: self.pump(engine, timeout))
        if not self.stopped:
            raise api.EngineError("its run returned before pump said stop")

    def _ended(self) -> list[int]:
        """The engine's processes that have ended; an engine sees the sockets of one close a moment before the
        kernel reports it as ended."""
        ended, _, _ = select.select(list(self.pidfds.values()), [], [], NOTICE_S if self.pidfds else 0)
        return [pid for pid, descriptor in self.pidfds.items() if descriptor in ended]

    def report(self, error: Exception) -> None:
        """Say what broke, whatever it was: this is the process boundary. Only the first counts."""
        if self.failed:
            return
        self.failed = True
        short = shortage(error)
        lacking = isinstance(error, ImportError) and not short  # an engine may import late: on its first step
        usage = lacking or isinstance(error, api.BadSetting)
        known = isinstance(error, api.EngineError)
        message = str(error) if known else short or f"{type(error).__name__}: {error} ({_where(error)})"
        if lacking:
            message = f"{sys.executable} can't run the engine of {self.config.name}: {error}"
        named = isinstance(error, api.EngineError) and error.names_process
        ended = [] if named else self._ended()
        self.reply(api.Failed(self.config.name, message, usage, traceback.format_exc(), ended))

    def reply(self, message: api.FromHost) -> None:
        self.replies.send(self._encode(message))

    def pump(self, engine: api.Engine, timeout: float | None) -> bool:
        """Deliver waiting messages; False once the harness said stop. An empty inbox costs ~1 us. Where
        engines take turns, the caller sleeps in here until it has the baton."""
        if self.turning:
            assert self.turns is not None
            self.turns.between_steps(engine, idle=timeout != 0)
        elif timeout != 0:
            ready = dict(self.poller.poll(None if timeout is None else int(timeout * 1e3)))
            if not ready:
                return True
            if self.parent in ready:
                end_session()
        if not self._deliver(engine):
            return False
        return self._park(engine) if self.turning else True

    def _park(self, engine: api.Engine) -> bool:
        """Sleep until this engine holds the baton, turns are over, or one of its processes has ended, which
        it then finds out and explains; messages are delivered meanwhile. False once the harness said stop."""
        while self.turning:
            turns = self.turns  # read anew: messages may end these and begin the next ones
            assert turns is not None
            if turns.holding:
                break
            ready = dict(self._parking.poll(int(turns.patience_s * 1e3)))
            if self.parent in ready:
                end_session()
            if not ready:
                self.reply(api.Waiting(self.config.name, turns.patience_s))
            if not self._deliver(engine):
                return False
            if self.turning and turns is self.turns and self._baton in ready:
                turns.take()
            if any(each in ready for each in self.pidfds.values()):
                break
        return True

    def _deliver(self, engine: api.Engine) -> bool:
        """Every message that is there; False once the harness said stop."""
        while True:
            try:
                message = self._decode(self.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            match message:
                case api.Submit(request):
                    engine.submit(request)
                    self._count_request()
                case api.BeginRound():
                    engine.begin_round()
                    self.reply(api.Begun(self.config.name))
                case api.BeginProfile(steps):
                    engine.begin_profile(steps)
                    self.reply(api.Begun(self.config.name))
                case api.BeginTurns():
                    own = {os.getpid(), *self.pidfds}
                    self.turns, self.turning = Turns(message, self._baton, own, engine.delay), True
                    engine.begin_turns()
                    self.reply(api.Begun(self.config.name))
                case api.EndTurns():
                    self.turning = False
                    engine.end_turns()
                case api.Collect():
                    self.reply(api.Collected(self.config.name, engine.collect(), self._taken_turns()))
                case api.Stop():
                    self.stopped = True
                    return False

    def _count_request(self) -> None:
        if self.turning and self.turns is not None and self.turns.count_request():
            self.reply(api.Parked(self.config.name))

    def _taken_turns(self) -> api.TurnTable | None:
        """What was recorded of turns that are over, once."""
        if self.turns is None:
            return None
        turns, self.turns = self.turns, None
        turns.close()
        return turns.table()

    def close(self) -> None:
        self.context.destroy(linger=1000)


def build_engine(config: api.HostConfig) -> api.Engine:
    """The engine, built but not started."""
    module, function = config.build.split(":")
    try:
        engine: api.Engine = getattr(import_module(module), function)(config.options, config.toggles)
    except ImportError as error:
        error.msg += hint(error)
        raise
    return engine


def origin(engine: api.Engine) -> str:
    """The file that holds the engine's class, "" where it has none."""
    return getattr(sys.modules.get(type(engine).__module__), "__file__", None) or ""


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}, in {last.name}"


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the harness's to answer; it stops the host
    config = msgspec.json.decode(sys.argv[1], type=api.HostConfig)
    die_with_parent(config.parent, with_all=True)
    host = Host(config)
    try:
        host.serve()
    except Exception as error:
        host.report(error)
        return 1
    finally:
        host.close()
    return 0


if __name__ == "__main__":
    os._exit(main())  # torch's and zmq's teardown at exit can hang for seconds; everything is closed by now
