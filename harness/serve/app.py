"""What a server answers: an ASGI application over one engine.

A request is let in, prepared, and submitted; what the engine says of it is passed on as it comes. The first
word of the engine decides the status: a request that it refuses is a 400 even where a stream was asked for.
A client that hangs up, streaming or not, is noticed at once, and its request cancelled in the engine.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from time import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engines import api
from harness.serve import parsing, replies
from harness.serve.engine_process import EngineLost, EngineProcess, HungUp, Stream
from harness.serve.meters import CONTENT_TYPE, Meter, Meters
from harness.serve.parsing import Refused, Wanted
from harness.serve.prompting import Prompting

MOST_BYTES = 16 << 20  # of a body
RETRY_S = 1  # for a client that was turned away because the server is full
CLIENT_GONE = 499  # nobody reads it
Parse = Callable[[bytes, str, float], Wanted]


@dataclass(frozen=True, slots=True)
class Rules:
    """Who is let in, and how many."""

    api_key: str | None = None  # what /v1 asks for; None: nothing
    most_in_flight: int = 1024
    temperature: float = 1.0  # where a request does not say


class App:
    """One server's answers. `asgi` is the application."""

    def __init__(self, engine: EngineProcess, model: dict[str, str | int | float], rules: Rules) -> None:
        self.closing = ""  # why nobody is let in any more
        self._engine = engine
        self._model = str(model["name"])
        self._context = int(model["context"])
        self._rules = rules
        self._prompting = Prompting(model)
        self._meters = Meters()
        self._started = int(time())
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={
                Refused: _refused,
                HTTPException: _not_found,
                ClientDisconnect: _gone,
                Exception: _broken,
            },
        )

    async def _completions(self, request: Request) -> Answering:
        return await self._let_in(request, "completions", parsing.parse_completion)

    async def _chat(self, request: Request) -> Answering:
        return await self._let_in(request, "chat", parsing.parse_chat)

    async def _let_in(self, request: Request, endpoint: str, parse: Parse) -> Answering:
        """A request on its way into the engine. Raises Refused."""
        meter = Meter(self._meters, endpoint)
        try:
            self._check_key(request)
            self._check_room()
            wanted = parse(await _body(request), self._model, self._rules.temperature)
            prepared = await self._prompting.prepare(wanted.request, wanted.messages)
            self._check_room()  # others may have come while this one was read
        except Refused:
            meter.end("refused")
            raise
        reply = replies.Reply(
            name=f"{'chatcmpl' if wanted.chat else 'cmpl'}-{secrets.token_hex(12)}",
            model=self._model,
            created=int(time()),
            wanted=wanted,
            prompt_tokens=0 if isinstance(prepared.prompt, str) else len(prepared.prompt),
        )
        return Answering(self._engine, self._engine.submit(prepared), reply, meter)

    def _check_key(self, request: Request) -> None:
        key = self._rules.api_key
        if key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
            raise Refused(401, "send the API key as 'Authorization: Bearer KEY'", "invalid_api_key")

    def _check_room(self) -> None:
        if self._engine.failure:
            raise Refused(503, self._engine.failure, "engine_lost")
        if self.closing:
            raise Refused(503, self.closing, "shutting_down")
        most = self._rules.most_in_flight
        if self._engine.in_flight >= most:
            raise Refused(429, f"{most} requests are in flight, and no more are taken", "full", RETRY_S)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        entry = {"id": self._model, "object": "model", "created": self._started, "owned_by": "overlap-bench"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self._context}]})

    async def _health(self, request: Request) -> Response:
        why = self._engine.failure or self.closing
        return JSONResponse(replies.error(503, why), 503) if why else JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        gauges = await self._engine.gauges()
        self._meters.in_flight.set(self._engine.in_flight)
        return Response(self._meters.text(gauges), media_type=CONTENT_TYPE)


class Answering:
    """An ASGI response: what the engine says of one request, until its end or until the client hangs up."""

    def __init__(self, engine: EngineProcess, stream: Stream, reply: replies.Reply, meter: Meter) -> None:
        self._engine = engine
        self._stream = stream
        self._reply = reply
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(_watch(receive, self._stream))
        try:
            answer = self._in_pieces if self._reply.wanted.streamed else self._at_once
            await answer(send)
        except HungUp:
            self._meter.end("cancelled")
        finally:
            watching.cancel()
            self._engine.cancel(self._stream)  # nothing, where it has ended

    async def _at_once(self, send: Send) -> None:
        chunks: list[api.Chunk] = []
        try:
            while True:
                for event in await self._stream.events():
                    match event:
                        case api.Chunk():
                            self._meter.chunk(event)
                            chunks.append(event)
                        case api.Finish():
                            self._meter.finish(event)
                            await _send_json(send, 200, self._reply.whole(chunks, event))
                            return
                        case api.Error(message=message):
                            raise Refused(500 if chunks else 400, message)
        except EngineLost as lost:
            await self._refuse(send, Refused(503, str(lost), "engine_lost"))
        except Refused as refused:
            await self._refuse(send, refused)

    async def _in_pieces(self, send: Send) -> None:
        try:
            events = await self._stream.events()
            if isinstance(events[0], api.Error):
                raise Refused(400, events[0].message)
        except EngineLost as lost:
            await self._refuse(send, Refused(503, str(lost), "engine_lost"))
            return
        except Refused as refused:
            await self._refuse(send, refused)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces = [self._reply.opening()]
        try:
            while True:
                pieces += self._pieces(events)
                ended = not isinstance(events[-1], api.Chunk)
                await _send_body(send, b"".join(pieces), more=not ended)
                if ended:
                    return
                events = await self._stream.events()
                pieces = []
        except EngineLost as lost:
            self._meter.end("error")
            await _send_body(send, replies.event(replies.error(503, str(lost), "engine_lost")), more=False)

    def _pieces(self, events: list[api.Event]) -> list[bytes]:
        """Server-sent events. The last chunk carries the reason of the end, as clients count chunks; an error
        in mid-stream is an event of its own, and no [DONE] follows it."""
        pieces: list[bytes] = []
        behind = [*events[1:], None]
        for event, following in zip(events, behind, strict=True):
            match event:
                case api.Chunk():
                    self._meter.chunk(event)
                    finish = following if isinstance(following, api.Finish) else None
                    pieces.append(self._reply.chunk(event, finish))
                case api.Finish():
                    self._meter.finish(event)
                    if len(events) == 1:  # it came without a last chunk
                        pieces.append(self._reply.chunk(api.Chunk(event.id, [], "", []), event))
                    pieces.append(self._reply.closing(event))
                case api.Error(message=message):
                    self._meter.end("error")
                    pieces.append(replies.event(replies.error(500, message)))
        return pieces

    async def _refuse(self, send: Send, refused: Refused) -> None:
        self._meter.end("refused" if refused.status < 500 else "error")
        await _send_json(send, refused.status, replies.refusal(refused))


async def _watch(receive: Receive, stream: Stream) -> None:
    """Tell the stream when its client hangs up. The body has been read, so nothing else is received."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.hang_up()


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the body has more than {MOST_BYTES} bytes")
    return bytes(body)


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _send_body(send, body, more=False)


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    headers = {} if refused.retry_s is None else {"Retry-After": str(refused.retry_s)}
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(replies.refusal(refused), refused.status, headers, "application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    """A path or a method that is not there."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(replies.error(error.status_code, message), error.status_code, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    """Its client hung up before the whole request was there."""
    return Response(status_code=CLIENT_GONE)


async def _broken(request: Request, error: Exception) -> Response:
    """Starlette raises the error again, for the log."""
    return JSONResponse(replies.error(500, f"unexpected {type(error).__name__}: {error}"), 500)
