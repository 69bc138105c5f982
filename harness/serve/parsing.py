"""The bodies of requests, as OpenAI's API has them and vLLM extends them, made into what an engine is asked.

What would change the answer and cannot be done is refused, never ignored: a benchmark that asks for a penalty
and does not get it has measured something else. The same goes for fields that nobody knows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engines import api

ALL = -1  # vLLM's top_k for what is 0 here
DEFAULT_TOKENS = 16  # of a completion that does not say; a chat gets what its context has room for


class Refused(Exception):
    """A request that is answered with an error; the message is one line for whoever sent it."""

    def __init__(
        self, status: int, message: str, code: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_s = retry_s  # when it is worth another try, where it is


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # there is none to leave out


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. null is the same as nothing."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # its newer name
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # vLLM's, as the next three
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]


class Part(msgspec.Struct, frozen=True):
    """A piece of a message's content."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[Message]


IGNORED = frozenset(  # changes no token
    ("user", "metadata", "store", "service_tier", "request_id", "safety_identifier", "prompt_cache_key")
)
# Not supported, but for these values, which ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for.

    `request` lacks its id; its prompt is text or ids, or empty where `messages` stand for it; its
    max_new_tokens is 0 where the context's room is meant.
    """

    request: api.Request
    messages: list[dict[str, str]]
    streamed: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool

    @property
    def chat(self) -> bool:
        return bool(self.messages)


def parse_completion(body: bytes, model: str, temperature: float) -> Wanted:
    """The body of POST /v1/completions; `temperature` where it does not say. Raises Refused."""
    parsed: CompletionBody = _parsed(body, CompletionBody, model)
    return _wanted(parsed, _one_prompt(parsed.prompt), [], DEFAULT_TOKENS, temperature)


def parse_chat(body: bytes, model: str, temperature: float) -> Wanted:
    """The body of POST /v1/chat/completions. Raises Refused."""
    parsed: ChatBody = _parsed(body, ChatBody, model)
    if not parsed.messages:
        raise Refused(400, "messages is empty")
    messages = [{"role": each.role, "content": _text(each)} for each in parsed.messages]
    return _wanted(parsed, "", messages, 0, temperature)


def _parsed(body: bytes, kind: type, model: str) -> Any:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not a JSON object: {error}") from error
    try:
        known = _known(fields, [field.name for field in msgspec.structs.fields(kind)])
        parsed: Any = msgspec.convert(known, type=kind)
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from error
    if parsed.model is not None and parsed.model != model:
        raise Refused(404, f"the model '{parsed.model}' does not exist; there is {model}", "model_not_found")
    return parsed


def _known(fields: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The fields to look at. Raises Refused for one that is unknown, or asks for what is not to be had."""
    known = {}
    for name, value in fields.items():
        if name in NEUTRAL:
            if not _neutral(value, NEUTRAL[name]):
                shown = msgspec.json.encode(value).decode()
                raise Refused(400, f"{name}={shown} is not supported", "unsupported_parameter")
        elif name not in IGNORED:
            try:
                api.pick(name, dict.fromkeys([*names, *NEUTRAL]), "field")
            except api.BadSetting as error:
                raise Refused(400, str(error), "unknown_parameter") from error
            known[name] = value
    return known


def _neutral(value: Any, among: tuple[Any, ...]) -> bool:
    """null, or one of these; 0 is not false."""
    return value is None or any(value == each and type(value) is type(each) for each in among)


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """Text or ids; a list of one of them is that one."""
    match prompt:
        case str():
            return prompt
        case [str(only)] | [[*only]]:
            return only
        case [*ids] if ids and all(isinstance(each, int) for each in ids):
            return [each for each in ids if isinstance(each, int)]
        case []:
            raise Refused(400, "the prompt is empty")
    raise Refused(400, "prompt holds several prompts; send one at a time")


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise Refused(400, f"content of type '{part.type}' is not supported; there is text")
    return "".join(part.text for part in message.content)


def _wanted(
    body: Body, prompt: str | list[int], messages: list[dict[str, str]], most: int, temperature: float
) -> Wanted:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked is not None and asked < 1:
        raise Refused(400, f"max_tokens must be at least 1, not {asked}")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if body.min_tokens and (stop or not body.ignore_eos):
        raise Refused(400, "min_tokens needs ignore_eos and no stop strings; then it is always met")
    options = body.stream_options or StreamOptions()
    request = api.Request(
        id=0,
        prompt=prompt,
        max_new_tokens=most if asked is None else asked,
        stop_on_eos=not body.ignore_eos,
        temperature=temperature if body.temperature is None else body.temperature,
        top_k=0 if body.top_k in (None, ALL) else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=random.getrandbits(63) if body.seed is None else body.seed,
        stop=stop,
    )
    return Wanted(
        request=request,
        messages=messages,
        streamed=bool(body.stream),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        token_ids=bool(body.return_token_ids),
    )
