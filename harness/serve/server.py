"""A server's life: bind, boot the engine, serve, and end in order.

SIGTERM and Ctrl-C: nobody is let in any more (503), requests that run may end within the grace, the rest are
told, and the engine stops. A second signal ends the grace.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
import uvloop

from engines import api, sockets
from harness.plan.design import Arm
from harness.plan.settings import spelled
from harness.run.hosts import RunFailed
from harness.serve.app import App, Rules
from harness.serve.connections import Connection
from harness.serve.engine_process import EngineProcess
from harness.serve.listening import address_of, bind
from harness.serve.tokenizing import Tokenizing

SHUTTING_DOWN = "the server is shutting down"
KEEP_ALIVE_S = 75  # of an idle connection: a client's pool must not find it closed in mid-benchmark
FLUSH_S = 5  # for last words to clients
POLL_S = 0.02
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(arm: Arm, host: str, port: int, rules: Rules, grace_s: float) -> None:
    """Serve one engine until SIGTERM, or Ctrl-C (KeyboardInterrupt); the address goes to stdout once requests
    are taken. Raises BadSetting, and RunFailed where the engine does not start, or was lost."""
    sockets.allow_many()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop has its own
    with bind(host, port) as listener, EngineProcess(arm) as engine:
        description = engine.boot()
        _say(describe(description))
        gc.collect()
        gc.freeze()  # what was imported lives for ever: a collection need not look at it in mid-stream
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ended_by = runner.run(_serve(engine, description.model, rules, listener, grace_s))
        failure = engine.failure
    if failure:
        raise RunFailed(failure)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def describe(description: api.Description) -> str:
    """What is served, in a line."""
    device = description.device
    where = f"{description.model['name']} by {description.engine} on {device['kind']}"
    return f"{where}: {spelled(description.toggles)}"


class _Server(uvicorn.Server):
    """Signals are answered in `_serve`: uvicorn would stop listening at once, and the kernel refuse what
    comes meanwhile, instead of our 503."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    engine: EngineProcess,
    model: dict[str, str | int | float],
    rules: Rules,
    listener: socket.socket,
    grace_s: float,
) -> int:
    """The signal that ended it."""
    tokenizing = Tokenizing(model)
    try:
        await tokenizing.start()
        return await _listen(engine, App(engine, model, tokenizing, rules), listener, grace_s)
    finally:
        await tokenizing.stop()


async def _listen(engine: EngineProcess, app: App, listener: socket.socket, grace_s: float) -> int:
    """The signal that ended it."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for each in SIGNALS:
        loop.add_signal_handler(each, signals.put_nowait, each)
    engine.attach()
    server = _Server(
        uvicorn.Config(
            app.asgi,
            http=cast("type[Connection]", partial(Connection, meters=app.meters)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        if serving.done():
            await serving
        await asyncio.sleep(POLL_S)
    sys.stdout.write(f"{address_of(listener)}\n")
    sys.stdout.flush()

    ended_by = await signals.get()
    app.close(SHUTTING_DOWN)
    if engine.in_flight:
        _say(f"{SHUTTING_DOWN}: requests in flight: {engine.in_flight}; they have {grace_s:g} s")
    waits = [asyncio.create_task(_idle(engine)), asyncio.create_task(signals.get())]
    await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    engine.give_up(SHUTTING_DOWN)
    server.should_exit = True
    loop.call_later(FLUSH_S, _drop, server)
    await serving
    return ended_by


def _drop(server: uvicorn.Server) -> None:
    """End the connections of clients that do not read: what is sent to them would wait for ever."""
    for connection in server.server_state.connections:
        connection.transport.abort()


async def _idle(engine: EngineProcess) -> None:
    while engine.in_flight:
        await asyncio.sleep(POLL_S)


def _say(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")
    sys.stderr.flush()
