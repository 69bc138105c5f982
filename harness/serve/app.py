"""What a server answers: an ASGI application over one engine.

A request is let in, read, tokenized, and submitted; what the engine says of it is passed on as it comes. The
first word of the engine decides the status: a request that it refuses is a 400 even where a stream was asked
for. A client that hangs up, streaming or not, is noticed at once, and its request cancelled, wherever it is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import time

import msgspec
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
from harness.serve.parsing import Refused, Served, Wanted, too_long
from harness.serve.places import FULL, RETRY_S, Place, Places
from harness.serve.prompting import check_length
from harness.serve.tokenizing import Tokenizing

MOST_BYTES = 16 << 20  # of a body
JSON_PER_BYTE = 6  # "A" may be written as "\u0041"
BESIDE_PROMPT = 256 << 10  # bytes of a body that are not its prompt
CLIENT_GONE = 499  # nobody reads it
SERVER_FAULT = 500
Parse = Callable[[bytes, Served], Wanted]


@dataclass(frozen=True, slots=True)
class Rules:
    """Who is let in, and how many."""

    api_key: str | None = None  # what /v1 asks for; None: nothing
    most_in_flight: int = 1024
    temperature: float = 1.0  # where a request does not say


class App:
    """One server's answers. `asgi` is the application."""

    def __init__(
        self,
        engine: EngineProcess,
        model: dict[str, str | int | float],
        tokenizing: Tokenizing,
        rules: Rules,
    ) -> None:
        self._engine = engine
        self._served = Served(str(model["name"]), int(model["context"]), rules.temperature)
        self._tokenizing = tokenizing
        self._rules = rules
        self._closing = ""  # why nobody is let in any more
        self._places = Places()
        self.meters = Meters()
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

    def close(self, why: str) -> None:
        """Let nobody in any more, and end what is not in the engine yet."""
        self._closing = why
        self._places.end(Refused(503, why, "shutting_down"))

    async def _completions(self, request: Request) -> Answering:
        return await self._let_in(request, "completions", parsing.parse_completion)

    async def _chat(self, request: Request) -> Answering:
        return await self._let_in(request, "chat", parsing.parse_chat)

    async def _let_in(self, request: Request, endpoint: str, parse: Parse) -> Answering:
        """A request on its way into the engine. Raises Refused and ClientDisconnect."""
        meter = Meter(self.meters, endpoint)
        try:
            self._check_key(request)
            self._check_open()
            self._check_room()
            async with self._places.take() as place:
                body = await self._body(request, place, endpoint)
                wanted = parse(body, self._served)
                del body  # large ones are not kept while they are tokenized
                prepared = await self._prepared(wanted, request.receive, place)
                reply = self._reply(wanted, prepared)
                self._check_open()  # it may have changed meanwhile
                return Answering(self._engine, self._engine.submit(prepared), reply, meter)
        except Refused as refused:
            meter.end("error" if refused.status == SERVER_FAULT else "refused")
            raise
        except ClientDisconnect:
            meter.end("cancelled")
            raise
        except Exception:
            meter.end("error")
            raise

    def _reply(self, wanted: Wanted, prepared: api.Request) -> replies.Reply:
        return replies.Reply(
            name=f"{'chatcmpl' if wanted.chat else 'cmpl'}-{secrets.token_hex(12)}",
            model=self._served.model,
            created=int(time()),
            wanted=replace(wanted, request=prepared, messages=[]),  # the text is not needed any more
            prompt_tokens=0 if isinstance(prepared.prompt, str) else len(prepared.prompt),
        )

    async def _body(self, request: Request, place: Place, endpoint: str) -> bytes:
        """Raises Refused for one with more bytes than any prompt that fits needs. Of a chat, a template may
        leave out any part."""
        most, longest = MOST_BYTES, self._tokenizing.most_bytes
        if longest is not None and not (endpoint == "chat" and self._tokenizing.has_template):
            most = min(MOST_BYTES, BESIDE_PROMPT + JSON_PER_BYTE * longest)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                context = self._served.context
                message = (
                    f"the body has more than {most} bytes, more than a context of {context} tokens needs"
                )
                raise Refused(413, message, "context_length_exceeded")
            place.hold(len(piece))
        place.read()
        return bytes(body)

    async def _prepared(self, wanted: Wanted, receive: Receive, place: Place) -> api.Request:
        """What the engine is asked: with token ids, where the engine names a tokenizer. Raises Refused and
        ClientDisconnect."""
        prompt = wanted.request.prompt
        if isinstance(prompt, str):
            check_length(
                prompt, self._served.context, self._tokenizing.most_bytes
            )  # without waiting its turn
            watching = asyncio.create_task(_watch(receive, lambda: place.end(ClientDisconnect())))
            try:
                prompt = await self._tokenizing.prompt(wanted.messages or prompt)
            finally:
                watching.cancel()
        room = self._room(wanted.request.max_new_tokens, prompt)
        return msgspec.structs.replace(wanted.request, prompt=prompt, max_new_tokens=room)

    def _room(self, asked: int, prompt: str | list[int]) -> int:
        """How many tokens may come; 0 asks for as many as fit."""
        if isinstance(prompt, str):
            if not asked:
                raise Refused(400, "this engine names no tokenizer, so max_tokens must be given")
            return asked
        if not prompt:
            raise Refused(400, "the prompt is empty")
        left = self._served.context - len(prompt)
        if asked > left or left < 1:
            raise too_long(self._served.context, str(len(prompt)), asked)
        return asked or left

    def _check_key(self, request: Request) -> None:
        key = self._rules.api_key
        if key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
            raise Refused(401, "send the API key as 'Authorization: Bearer KEY'", "invalid_api_key")

    def _check_open(self) -> None:
        if self._engine.failure:
            raise Refused(503, self._engine.failure, "engine_lost")
        if self._closing:
            raise Refused(503, self._closing, "shutting_down")

    def _check_room(self) -> None:
        most = self._rules.most_in_flight
        if len(self._places.taken) + self._engine.in_flight >= most:
            raise Refused(429, f"{most} requests are in flight, and no more are taken", FULL, RETRY_S)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        entry = {"id": self._served.model, "object": "model", "created": self._started}
        more = {"owned_by": "overlap-bench", "max_model_len": self._served.context}
        return JSONResponse({"object": "list", "data": [entry | more]})

    async def _health(self, request: Request) -> Response:
        why = self._engine.failure or self._closing
        return JSONResponse(replies.error(503, why), 503) if why else JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        gauges = await self._engine.gauges()
        self.meters.preparing.set(len(self._places.taken))
        self.meters.tokenizing.set(self._tokenizing.running)
        self.meters.waiting.set(self._tokenizing.waiting)
        self.meters.in_flight.set(self._engine.in_flight)
        return Response(self.meters.text(gauges), media_type=CONTENT_TYPE)


class Answering:
    """An ASGI response: what the engine says of one request, until its end or until the client hangs up."""

    def __init__(self, engine: EngineProcess, stream: Stream, reply: replies.Reply, meter: Meter) -> None:
        self._engine = engine
        self._stream = stream
        self._reply = reply
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(_watch(receive, self._stream.hang_up))
        try:
            answer = self._in_pieces if self._reply.wanted.streamed else self._at_once
            await answer(send)
        except HungUp:
            self._meter.end("cancelled")
        except Exception:
            self._meter.end("error")
            raise
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


async def _watch(receive: Receive, tell: Callable[[], None]) -> None:
    """Tell when the client hangs up. The body has been read, so nothing else is received."""
    while (await receive())["type"] != "http.disconnect":
        pass
    tell()


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
