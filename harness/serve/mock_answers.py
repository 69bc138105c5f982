"""What the mock server (mock.py) takes in of a request, and the bytes of its answers.

OpenAI's completions and chat completions over HTTP/1.1, streaming and not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

MODEL = "mock"
TOKEN = " token"  # every token's text
STATUS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large"}
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"  # ends a chunked body

Connection = TypeVar("Connection")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk


class Body(msgspec.Struct):
    """What a mock looks at in a request; everything else is taken as it comes."""

    prompt: str | list[str | int | list[int]] = ""
    messages: list[dict[str, Any]] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


def prompt_tokens(body: Body) -> int:
    """Ids, or words: a mock has no tokenizer."""
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    return sum(map(_tokens, (*prompt, *(message.get("content") for message in body.messages))))


def _tokens(content: Any) -> int:
    match content:
        case str():
            return len(content.split())
        case int():
            return 1
        case list():
            return sum(map(_tokens, content))
        case {"text": str() as text}:  # a part of a message; an image has none
            return _tokens(text)
    return 0  # null: a message that calls a tool has no content


@dataclass(slots=True, eq=False)
class Answer(Generic[Connection]):
    """One request being answered. `due_ns` is when its next token is due."""

    connection: Connection
    name: str
    chat: bool
    streamed: bool
    options: StreamOptions
    prompt_tokens: int
    total: int  # tokens it will have
    due_ns: int
    most: int  # tokens of a chunk
    created: int
    made: int = 0  # tokens that came due
    unsent: int = 0  # of these, those that wait for the others of their chunk
    size: int = 1  # tokens of the chunk that is being made
    headers: bytes = EVENT_STREAM  # until they were sent
    _events: dict[int, bytes] = field(default_factory=dict)

    def role(self) -> bytes:
        """A chat's first event, which brings no token. It is sent at once, as servers do: a client that takes
        it for a token reads a TTFT of nearly nothing."""
        headers, self.headers = self.headers, b""
        return headers + framed(self._body({"delta": {"role": "assistant", "content": ""}}, None, None))

    def token(self) -> bytes:
        """One more token is due; what there is to send now, b"" where its chunk is not full yet."""
        self.made += 1
        self.unsent += 1
        last = self.made == self.total
        if not self.streamed:
            return self._whole() if last else b""
        if not last and self.unsent < self.size:
            return b""
        data = self.headers + (self._end() if last else self._middle())
        self.headers = b""
        self.unsent = 0
        self.size = self.size % self.most + 1
        return data

    def _middle(self) -> bytes:
        """A chunk like all others of its size, unless it says the usage so far."""
        if self.options.continuous_usage_stats:
            return framed(self._body(self._text(self.unsent), None, self._usage()))
        event = self._events.get(self.unsent)
        if event is None:
            event = self._events[self.unsent] = framed(self._body(self._text(self.unsent), None, None))
        return event

    def _end(self) -> bytes:
        """The last chunk and all that is behind it."""
        usage = self._usage() if self.options.continuous_usage_stats else None
        data = framed(self._body(self._text(self.unsent), "length", usage))
        if self.options.include_usage:
            data += framed(self._body(None, None, self._usage()))
        return data + framed(b"data: [DONE]\n\n") + LAST

    def _text(self, tokens: int) -> dict[str, Any]:
        text = TOKEN * tokens
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _body(
        self, brought: dict[str, Any] | None, finish: str | None, usage: dict[str, int] | None
    ) -> bytes:
        """One event; `brought` None: one without a choice."""
        choices = []
        if brought is not None:
            choices = [{"index": 0, **brought, "logprobs": None, "finish_reason": finish}]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body: dict[str, Any] = {**self._head(kind), "choices": choices}
        if usage is not None or self.options.include_usage:
            body["usage"] = usage
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _whole(self) -> bytes:
        text = TOKEN * self.total
        brought = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **brought, "logprobs": None, "finish_reason": "length"}
        kind = "chat.completion" if self.chat else "text_completion"
        return reply(200, {**self._head(kind), "choices": [choice], "usage": self._usage()})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": MODEL}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
        }


def framed(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(status: int, content: Any) -> bytes:
    body = msgspec.json.encode(content)
    return (
        f"HTTP/1.1 {status} {STATUS[status]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def refusal(status: int, message: str) -> bytes:
    kind = "invalid_request_error"
    return reply(status, {"error": {"message": message, "type": kind, "param": None, "code": None}})
