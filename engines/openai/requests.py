"""What a request looks like on the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.openai.endpoint import Endpoint

LIMITS = ("max_tokens", "max_completion_tokens")  # a server may know only one of these names
PATHS = {"completions": "/completions", "chat": "/chat/completions"}


def body(request: api.Request, model: str, kind: str, count: str, limit: str = LIMITS[0]) -> dict[str, Any]:
    """The JSON of a request; `kind` is the toggle `api`. Raises BadSetting for token ids to a chat.

    What only some servers know is left out where it would say nothing: `ignore_eos` and `top_k` (vLLM,
    SGLang, and not OpenAI).
    """
    asked: dict[str, Any] = {
        "model": model,
        limit: request.max_new_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "completions":
        asked["prompt"] = request.prompt
    elif isinstance(request.prompt, str):
        asked["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        raise api.BadSetting("api=chat asks with text, not with token ids; leave --pretok out")
    if not request.stop_on_eos:
        asked["ignore_eos"] = True
    if request.stop:
        asked["stop"] = request.stop
    if request.temperature > 0:
        asked["seed"] = request.seed
        asked["top_p"] = request.top_p
        if request.top_k:
            asked["top_k"] = request.top_k
    if count == "ids":
        asked["return_token_ids"] = True
    if count == "logprobs":
        asked["logprobs"] = 1 if kind == "completions" else True
    return asked


class Wire:
    """Makes the bytes of requests; the key is in its head and nowhere else."""

    def __init__(self, endpoint: Endpoint, model: str, kind: str, count: str, key: str) -> None:
        self.path = endpoint.path + PATHS[kind]
        self._model, self._kind, self._count = model, kind, count
        self.limit = LIMITS[0]
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {endpoint.authority}\r\nUser-Agent: overlap-bench\r\n"
            f"Accept: text/event-stream\r\nContent-Type: application/json\r\n{authorization}Content-Length: "
        ).encode()
        self._encode = msgspec.json.Encoder().encode

    def bytes_of(self, request: api.Request) -> bytes:
        """The whole request. Raises BadSetting."""
        content = self._encode(body(request, self._model, self._kind, self._count, self.limit))
        return b"%b%d\r\n\r\n%b" % (self._head, len(content), content)
