"""Chats as text, and text as token ids: what a tokenizing process does with a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from harness.serve.parsing import Refused, too_long
from harness.serve.token_bytes import most_bytes_per_token

Messages = list[dict[str, str]]


def plain(messages: Messages) -> str:
    """A chat for a model without a template: "role: content" lines, and an open one for the answer."""
    return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant:"


def may_have_template(model: str) -> bool:
    """Whether it is a folder or a hub id; presets have no template."""
    return Path(model).is_dir() or "/" in model


def load_template(model: str) -> Callable[[Messages], str] | None:
    """The chat template that belongs to a model's tokenizer; None where there is none."""
    if not may_have_template(model):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError):
        return None
    if not tokenizer.chat_template:
        return None

    def render(messages: Messages) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(text)

    return render


def check_length(text: str, context: int, most_bytes: int | None) -> None:
    """Raises Refused for a text that can't fit, however it is tokenized. `most_bytes`: None is any number."""
    if most_bytes is not None and (len(text) > most_bytes or len(text.encode()) > most_bytes):
        raise too_long(context, f"more than {most_bytes} bytes, which are more tokens than that")


class Prompting:
    """For one engine, by what it says of its model: "tokenizer", "name" and "context" of
    Description.model."""

    def __init__(self, model: Mapping[str, str | int | float]) -> None:
        path = str(model.get("tokenizer", ""))
        self._tokenizer = Tokenizer.from_file(path) if path else None
        self._template = load_template(str(model["name"]))
        self._context = int(model["context"])
        most = most_bytes_per_token(json.loads(self._tokenizer.to_str())) if self._tokenizer else None
        self.most_bytes = None if most is None else most * self._context  # of a text that may fit

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def prompt(self, asked: str | Messages) -> str | list[int]:
        """The prompt of a text or a chat: no more ids than the context has, or text where the engine names no
        tokenizer. Raises Refused."""
        text = asked if isinstance(asked, str) else self._render(asked)
        if self._tokenizer is None:
            return text
        check_length(text, self._context, self.most_bytes)
        # A template writes the special tokens itself.
        special = isinstance(asked, str) or self._template is None
        try:
            # `encode` would keep where in the text each token is: three times the time, and more memory.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception as error:  # whatever the tokenizer breaks on is the text's doing
            raise Refused(400, f"the prompt can't be tokenized: {error}") from error
        if len(encoding) >= self._context:
            raise too_long(self._context, f"{len(encoding)}")
        ids: list[int] = encoding.ids
        return ids

    def _render(self, messages: Messages) -> str:
        if self._template is None:
            return plain(messages)
        try:
            return self._template(messages)
        except Exception as error:  # templates raise what they like, such as for roles that do not alternate
            why = str(error) or type(error).__name__  # a MemoryError says nothing
            raise Refused(400, f"the model's chat template refuses these messages: {why}") from error
