"""What is sent back, as OpenAI's API has it: whole replies, the events of a stream, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from engines import api
from harness.serve.parsing import Refused, Wanted

FINISH_REASONS = {"length": "length", "eos": "stop", "stop": "stop"}
DONE = b"data: [DONE]\n\n"
RATE_LIMITED = 429


def error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error, which is also the one of an error in mid-stream."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if status == RATE_LIMITED:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refusal(refused: Refused) -> bytes:
    return msgspec.json.encode(error(refused.status, refused.message, refused.code))


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass(slots=True)
class Reply:
    """One request's answer, as far as it has come."""

    name: str
    model: str
    created: int
    wanted: Wanted
    prompt_tokens: int  # 0: not known before the end
    completion_tokens: int = 0

    def opening(self) -> bytes:
        """What comes before the first token: in a chat, who speaks."""
        if not self.wanted.chat:
            return b""
        return event(self._body(self._choice({"delta": {"role": "assistant", "content": ""}}, None)))

    def chunk(self, chunk: api.Chunk, finish: api.Finish | None) -> bytes:
        """Some tokens, and with the last ones why they are the last."""
        self.completion_tokens += len(chunk.token_ids)
        brought: dict[str, Any] = {"text": chunk.text}
        if self.wanted.chat:
            brought = {"delta": {"content": chunk.text}}
        if self.wanted.token_ids:
            brought["token_ids"] = chunk.token_ids
        body = self._body(self._choice(brought, finish))
        if self.wanted.continuous_usage:
            body["usage"] = self._usage()
        return event(body)

    def closing(self, finish: api.Finish) -> bytes:
        """What comes behind the last token."""
        if not self.wanted.include_usage:
            return DONE
        self._count(finish)
        return event({**self._body(None), "usage": self._usage()}) + DONE

    def whole(self, chunks: list[api.Chunk], finish: api.Finish) -> bytes:
        """All of it at once."""
        self._count(finish)
        text = "".join(chunk.text for chunk in chunks)
        brought: dict[str, Any] = {"text": text}
        if self.wanted.chat:
            brought = {"message": {"role": "assistant", "content": text}}
        if self.wanted.token_ids:
            brought["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        kind = "chat.completion" if self.wanted.chat else "text_completion"
        body = {**self._head(kind), "choices": [self._choice(brought, finish)], "usage": self._usage()}
        return msgspec.json.encode(body)

    def _count(self, finish: api.Finish) -> None:
        self.prompt_tokens, self.completion_tokens = finish.prompt_tokens, finish.completion_tokens

    def _choice(self, brought: dict[str, Any], finish: api.Finish | None) -> dict[str, Any]:
        reason = None if finish is None else FINISH_REASONS.get(finish.reason, finish.reason)
        return {"index": 0, **brought, "logprobs": None, "finish_reason": reason}

    def _body(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.wanted.chat else "text_completion"
        body = {**self._head(kind), "choices": [] if choice is None else [choice]}
        if self.wanted.include_usage:
            body["usage"] = None
        return body

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
