"""Files of prompts. What they are is told by their content, not by their name:

    plain text       one prompt a line
    JSON             a list, or one value on each line (JSON lines), of
        "text"                                                       a prompt
        {"prompt": "text"}                                           likewise; text, question, instruction
        {"conversations": [{"from": "human", "value": "text"}, ...]} ShareGPT
        {"messages": [{"role": "user", "content": "text"}, ...]}     OpenAI's; content: also a list of parts

JSON of any other form is refused, and never asked as it stands. Of a conversation, the first thing the human
said is the prompt; how long the answer was can say how many tokens to generate. Conversations that are too
short or too long are skipped by the rules of `vllm bench serve`, and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from overlap_bench.engines.api import BadFile
from overlap_bench.harness.common.text_files import SURROGATE, read_utf8

JSON_NAMES = (".json", ".jsonl", ".ndjson")  # of a file that is no plain text, whatever it holds
TABLES = (".csv", ".tsv")
TEXTS = ("prompt", "text", "question", "instruction")
MORE = ("input", "context")  # what an instruction or a question is about
TURNS = ("conversations", "conversation", "messages")
SPEAKERS = (("from", "value"), ("role", "content"))
HUMAN = ("human", "user")
PARTS = ("text", "input_text")
LINE_END = re.compile(rb"\r\n?|\n")  # splitlines() cuts at U+2028, form feeds and more
MEANT_AS_JSON = re.compile(r"""[\[{\s]*\{\s*["'][^"']+["']\s*:""")
BEHIND_AN_ITEM = frozenset(",]} \t")
AS_JSON = 'a prompt that is JSON itself is written {"prompt": "..."}'

SHORTEST = 4  # tokens of a prompt, and of an answer
LONGEST_PROMPT = 1024
LONGEST = 2048  # prompt and answer


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. `reply` is "" where nobody answered, None where it is of no conversation."""

    prompt: str
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class PromptFile:
    asked: tuple[Asked, ...]

    @property
    def are_conversations(self) -> bool:
        return self.asked[0].reply is not None


@cache
def read(path: str) -> PromptFile:
    """Every prompt of a file, in its order. Raises BadFile, one line, where there is none, or where it can't
    be told what is a prompt."""
    if path.lower().endswith(TABLES):
        raise BadFile(f"{path} is a table: give its prompts one a line, or as JSON lines")
    content = read_utf8(Path(path))
    found = [asked for where, value in _values(path, content) if (asked := _asked(where, value))]
    if not found:
        raise BadFile(f"no prompts in {path}: it is empty, or nobody asks anything in it")
    result = PromptFile(tuple(found))
    if any((each.reply is not None) != result.are_conversations for each in found):
        raise BadFile(f"{path} holds texts and conversations: give each in a file of its own")
    return result


def why_skipped(prompt: int, answer: int, output: int | None, context: int) -> str | None:
    """ "short", "long", or None for a conversation that is asked; all are numbers of tokens. `output`: what
    is generated whatever the answer was, None for as many as the answer has."""
    if prompt < SHORTEST or (output is None and answer < SHORTEST):
        return "short"
    total = prompt + (answer if output is None else output)
    if prompt > LONGEST_PROMPT or total > min(LONGEST, context):
        return "long"
    return None


# ---------------------------------------------------------------------------------------------------------
# Text or JSON


# What a line is; a part is of some JSON. A string in quotes may also be a text that somebody wrote in quotes.
Kind = Literal["text", "string", "JSON", "part"]


def _values(path: str, content: bytes) -> Iterator[tuple[str, object]]:
    """Each line of a text or each value of JSON, and where it stands."""
    items = _items(content)
    if items is not None:
        for number, item in enumerate(items, 1):
            where = f"{path}, item {number}"
            yield where, _decoded(where, _utf8(where, bytes(item)))
        return
    lines = {f"{path}, line {number}": line for number, line in _lines(path, content)}
    kinds = {where: _kind(line) for where, line in lines.items()}
    if "text" not in kinds.values() and "part" not in kinds.values():
        for where, line in lines.items():
            yield where, _decoded(where, line)
        return
    promised = path.lower().endswith(JSON_NAMES)
    for where, kind in kinds.items():
        if kind == "part" or (kind == "text" and (promised or "JSON" in kinds.values())):
            value = _decoded(where, lines[where], f"; give one value a line, or one list; {AS_JSON}")
            raise BadFile(f"{where} is {_shown(value)}, which is no prompt")
    yield from lines.items()


def _items(content: bytes) -> list[msgspec.Raw] | None:
    """What a JSON list holds, or an object that is the whole file; None where the file is neither."""
    try:
        whole = msgspec.json.decode(content, type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return [msgspec.Raw(content)] if isinstance(whole, dict) else whole


def _lines(path: str, content: bytes) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, by their number."""
    if b"\0" in content:
        raise BadFile(f"{path} holds NUL characters: it is binary, or UTF-16 without a byte order mark")
    for number, line in enumerate(LINE_END.split(content), 1):
        text = _utf8(f"{path}, line {number}", line).lstrip("\ufeff").strip()  # of files put together
        if text:
            yield number, text


def _utf8(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadFile(f"{where} is not UTF-8 text") from None


def _kind(line: str) -> Kind:
    if line[0] not in '[{"':
        return "text"
    try:
        value, end = json.JSONDecoder().raw_decode(line)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(line) or error.msg.startswith("Unterminated")
        part = line[0] != '"' and (cut or MEANT_AS_JSON.match(line))
        return "part" if part else "text"
    except (ValueError, RecursionError):
        return "part"
    if end == len(line):
        return "string" if isinstance(value, str) else "JSON"
    return "part" if not isinstance(value, str) and set(line[end:]) <= BEHIND_AN_ITEM else "text"


def _decoded(where: str, item: str, remedy: str = "") -> object:
    """By Python, which takes NaN: it may stand beside what is asked."""
    try:
        return json.loads(item)
    except json.JSONDecodeError as error:
        raise BadFile(f"{where} is not JSON: {error.msg} at character {error.pos + 1}{remedy}") from None
    except (ValueError, RecursionError) as error:  # numbers of any length, lists of any depth
        raise BadFile(f"{where} is not JSON that can be read: {error}") from None


# ---------------------------------------------------------------------------------------------------------
# Shapes


def _asked(where: str, value: object) -> Asked | None:
    """What is asked by one value; None where nobody asks anything."""
    candidates = _candidates(where, value)
    if isinstance(value, dict) and value.keys().isdisjoint((*TEXTS, *TURNS)):
        raise BadFile(
            f"{where} has none of the keys {', '.join((*TEXTS, *TURNS))}; it has {_shown(list(value))}"
        )
    asked = {name: each for name, each in candidates.items() if each is not None and each.prompt.strip()}
    if len({each.prompt for each in asked.values()}) > 1:
        raise BadFile(f"{where}: it is not clear which is asked, {' or '.join(asked)}; keep one of them")
    found = next(iter(asked.values()), None)
    if found is not None and SURROGATE.search(found.prompt):
        raise BadFile(f"{where}: its prompt holds half of a surrogate pair, which is no text")
    return found


def _candidates(where: str, value: object) -> dict[str, Asked | None]:
    """By key, each that may be meant as the prompt; conversations first, which have a reply besides."""
    if isinstance(value, str):
        return {"": Asked(value)}
    if isinstance(value, list):
        return {"": _opening(where, value)}
    if not isinstance(value, dict):
        raise BadFile(f"{where} is {_shown(value)}, which is no prompt")
    given = {name: each for name, each in value.items() if each is not None}
    found = {name: _opening(where, given[name]) for name in TURNS if name in given}
    for name in TEXTS:
        if isinstance(given.get(name), list):
            found[name] = _opening(where, given[name])
        elif name in given:
            parts = (name, *(MORE if name in ("instruction", "question") else ()))
            texts = [_text(where, each, given[each]) for each in parts if each in given]
            found[name] = Asked("\n\n".join(filter(str.strip, texts)))
    return found


def _text(where: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadFile(f"{where}: its {name} is {_shown(value)}, which is no text")
    return value


def _opening(where: str, turns: object) -> Asked | None:
    """The first human turn and the answer to it."""
    if not isinstance(turns, list):
        raise BadFile(f"{where}: {_shown(turns)} is no list of turns")
    for index, turn in enumerate(turns):
        speaker, prompt = _said(where, turn)
        if speaker in HUMAN and prompt.strip():
            replies = [_said(where, each) for each in turns[index + 1 : index + 2]]
            return Asked(prompt, "".join(text for who, text in replies if who not in HUMAN))
    return None


def _said(where: str, turn: object) -> tuple[str, str]:
    for who, what in SPEAKERS:
        if isinstance(turn, dict) and who in turn:
            content = turn.get(what) or ""  # null where a tool is called instead
            parts = [content] if isinstance(content, str) else content
            if not isinstance(parts, list):
                raise BadFile(f"{where}: {_shown(content)} is no text")
            return str(turn[who]).lower(), "\n".join(_part(where, each) for each in parts)
    raise BadFile(f"{where}: {_shown(turn)} is no turn with from and value, or role and content")


def _part(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadFile(f"{where}: only text can be asked, and {_shown(part)} is none")


def _shown(value: object) -> str:
    """As much of a value as tells what it is."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
