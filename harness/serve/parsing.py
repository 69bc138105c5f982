"""The bodies of requests, as OpenAI's API has them and vLLM extends them, made into what an engine is asked.

What would change the answer and cannot be done is refused, never ignored: a benchmark that asks for a penalty
and does not get it has measured something else. The same goes for fields that nobody knows.

A body is whatever a client makes of it, and is read on the thread that sends all streams. So every number has
its range, and nothing is built that is not looked at: of a list of a million lists, or a list of numbers in a
field that is ignored, no more is read than that it is JSON.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from engines import api
from harness.common.formatting import visible

ALL = -1  # vLLM's top_k for what is 0 here
DEFAULT_TOKENS = 16  # of a completion that does not say; a chat gets what its context has room for
INT32 = (1 << 31) - 1  # what any engine can count with
INT64 = (1 << 63) - 1  # what fits into a message to an engine
# Each step of the engine looks for the stop strings of each of its requests.
MOST_STOPS, LONGEST_STOP = 16, 256
SHOWN = 100  # characters of what a client sent, in a message to it
NEUTRAL_BYTES = 200  # more than what any of NEUTRAL takes


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


def too_long(context: int, prompt: str, more: int = 0) -> Refused:
    """A prompt, described by its length, that leaves no room for what is to come."""
    coming = f" with {more} more to come" if more else ""
    return Refused(
        400,
        f"this model's context is {context} tokens, and the prompt has {prompt}{coming}",
        "context_length_exceeded",
    )


Count = Annotated[int, msgspec.Meta(ge=1, le=INT32)]
TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=INT32)]]
PROMPTS: Mapping[bytes, Any] = {b"[": TokenIds, b"[[": list[TokenIds], b'["': list[str]}  # by their opening
Stop = Annotated[str, msgspec.Meta(max_length=LONGEST_STOP)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # there is none to leave out


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. null is the same as nothing."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # its newer name
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=ALL, le=INT32)] | None = None  # vLLM's, as the next three
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=INT32)] | None = None
    return_token_ids: bool | None = None
    seed: Annotated[int, msgspec.Meta(ge=-INT64 - 1, le=INT64)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: msgspec.Raw  # for _one_prompt


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
    chat: bool
    streamed: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class Served:
    """What a request is checked against: the model's name, its context in tokens, and the temperature of a
    request that does not say."""

    model: str
    context: int
    temperature: float


def parse_completion(body: bytes, served: Served) -> Wanted:
    """The body of POST /v1/completions. Raises Refused."""
    parsed: CompletionBody = _parsed(body, CompletionBody, served.model)
    return _wanted(parsed, _one_prompt(bytes(parsed.prompt), served.context), [], served)


def parse_chat(body: bytes, served: Served) -> Wanted:
    """The body of POST /v1/chat/completions. Raises Refused."""
    parsed: ChatBody = _parsed(body, ChatBody, served.model)
    if not parsed.messages:
        raise Refused(400, "messages is empty")
    messages = [{"role": each.role, "content": _text(each)} for each in parsed.messages]
    return _wanted(parsed, "", messages, served)


def _parsed(body: bytes, kind: type, model: str) -> Any:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not a JSON object: {error}") from error
    _check_fields(fields, [field.name for field in msgspec.structs.fields(kind)])
    try:
        parsed: Any = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, str(error)) from error
    if parsed.model is not None and parsed.model != model:
        message = f"the model '{_shown(parsed.model)}' does not exist; there is {model}"
        raise Refused(404, message, "model_not_found")
    return parsed


def _check_fields(fields: Mapping[str, msgspec.Raw], names: list[str]) -> None:
    """Raises Refused for one that is unknown, or asks for what is not to be had."""
    for name, value in fields.items():
        if name in NEUTRAL:
            if not _neutral(bytes(value), NEUTRAL[name]):
                shown = _shown(bytes(value).decode(errors="replace"))
                raise Refused(400, f"{name}={shown} is not supported", "unsupported_parameter")
        elif name not in IGNORED:
            try:
                api.pick(_shown(name), dict.fromkeys([*names, *NEUTRAL]), "field")
            except api.BadSetting as error:
                raise Refused(400, str(error), "unknown_parameter") from error


def _neutral(value: bytes, among: tuple[Any, ...]) -> bool:
    """null, or one of these; 0 is not false."""
    if len(value) > NEUTRAL_BYTES:
        return False
    try:
        found = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # 1e999 is JSON, and no number
        return False
    return found is None or any(found == each and type(found) is type(each) for each in among)


def _shown(text: str) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _one_prompt(prompt: bytes, context: int) -> str | list[int]:
    """Text or ids; a list of one of them is that one. The JSON is looked at first: of more ids than the
    context has room for, none is read."""
    opening = re.match(rb"\s*(\[?)\s*([\[\"]?)", prompt)
    assert opening is not None
    kind = PROMPTS.get(b"".join(opening.groups()), str)
    if kind in (TokenIds, list[TokenIds]) and prompt.count(b",") >= context:
        raise too_long(context, f"more than {context}")
    try:
        found: Any = msgspec.json.decode(prompt, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"prompt: {error}") from error
    if kind in (list[str], list[TokenIds]):
        if len(found) > 1:
            raise Refused(400, "prompt holds several prompts; send one at a time")
        (found,) = found
    if found == []:
        raise Refused(400, "the prompt is empty")
    one: str | list[int] = found
    return one


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text":
            raise Refused(400, f"content of type '{_shown(part.type)}' is not supported; there is text")
    return "".join(part.text for part in message.content)


def _wanted(body: Body, prompt: str | list[int], messages: list[dict[str, str]], served: Served) -> Wanted:
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    most = 0 if messages else DEFAULT_TOKENS
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if body.min_tokens and (stop or not body.ignore_eos):
        raise Refused(400, "min_tokens needs ignore_eos and no stop strings; then it is always met")
    options = body.stream_options or StreamOptions()
    request = api.Request(
        id=0,
        prompt=prompt,
        max_new_tokens=most if asked is None else asked,
        stop_on_eos=not body.ignore_eos,
        temperature=served.temperature if body.temperature is None else body.temperature,
        top_k=0 if body.top_k in (None, ALL) else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=random.getrandbits(63) if body.seed is None else body.seed,
        stop=stop,
    )
    return Wanted(
        request=request,
        messages=messages,
        chat=bool(messages),
        streamed=bool(body.stream),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        token_ids=bool(body.return_token_ids),
    )
