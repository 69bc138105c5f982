"""Chats as text, and text as token ids: here, in the server's process, so that the engine's steps are left
alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from engines import api
from harness.serve.parsing import Refused

Messages = list[dict[str, str]]


def plain(messages: Messages) -> str:
    """A chat for a model without a template: "role: content" lines, and an open one for the answer."""
    return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant:"


def load_template(model: str) -> Callable[[Messages], str] | None:
    """The chat template that belongs to a model's tokenizer; None where there is none, as for presets."""
    if not (Path(model).is_dir() or "/" in model):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None
    if not tokenizer.chat_template:
        return None

    def render(messages: Messages) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(text)

    return render


def _encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """A batch of one: `encode` would hold the interpreter's lock for as long as the text takes."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=special)[0].ids
    return ids


class Prompting:
    """For one engine, by what it says of its model: "tokenizer", "name" and "context" of
    Description.model. Without a tokenizer the engine gets text, and is left to find out how long it is."""

    def __init__(self, model: dict[str, str | int | float]) -> None:
        path = str(model.get("tokenizer", ""))
        self._tokenizer = Tokenizer.from_file(path) if path else None
        self._template = load_template(str(model["name"]))
        self._context = int(model["context"])

    async def prepare(self, request: api.Request, messages: Messages) -> api.Request:
        """The request with its prompt and its max_new_tokens. Raises Refused."""
        prompt = self._render(messages) if messages else request.prompt
        if isinstance(prompt, str) and self._tokenizer is not None:
            # A template writes the special tokens itself.
            special = not messages or self._template is None
            try:
                prompt = await asyncio.to_thread(_encode, self._tokenizer, prompt, special)
            except Exception as error:  # whatever the tokenizer breaks on is the text's doing
                raise Refused(400, f"the prompt can't be tokenized: {error}") from error
        room = self._room(request.max_new_tokens, prompt)
        return msgspec.structs.replace(request, prompt=prompt, max_new_tokens=room)

    def _render(self, messages: Messages) -> str:
        if self._template is None:
            return plain(messages)
        try:
            return self._template(messages)
        except Exception as error:  # templates raise what they like, such as for roles that do not alternate
            raise Refused(400, f"the model's chat template refuses these messages: {error}") from error

    def _room(self, asked: int, prompt: str | list[int]) -> int:
        """How many tokens may come; 0 asks for as many as fit."""
        if isinstance(prompt, str):
            if not asked:
                raise Refused(400, "this engine names no tokenizer, so max_tokens must be given")
            return asked
        if not prompt:
            raise Refused(400, "the prompt is empty")
        left = self._context - len(prompt)
        if asked > left or left < 1:
            raise Refused(
                400,
                f"this model's context is {self._context} tokens, and the prompt has {len(prompt)}"
                + (f" with {asked} more to come" if asked else ""),
                "context_length_exceeded",
            )
        return asked or left
