"""ShareGPT files: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}].

The first thing the human said is the prompt; how long the answer was can say how many tokens to generate.
What is too short or too long is skipped by the rules of `vllm bench serve`, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from engines.api import BadFile

HUMAN = ("human", "user")
SHORTEST = 4  # tokens of a prompt, and of an answer
LONGEST_PROMPT = 1024
LONGEST = 2048  # prompt and answer


class Turn(msgspec.Struct, frozen=True):
    speaker: str = msgspec.field(name="from")
    value: str


class Item(msgspec.Struct, frozen=True):
    conversations: list[Turn] = []


@dataclass(frozen=True, slots=True)
class Conversation:
    """`reply` is "" where nobody answered."""

    prompt: str
    reply: str


def is_conversations(prompts: object) -> bool:
    """Whether prompts are a ShareGPT file, by its name."""
    return isinstance(prompts, str) and prompts.endswith(".json")


@cache
def read(path: str) -> tuple[Conversation, ...]:
    """Every conversation in which a human said something. Raises BadFile where there is none to read."""
    try:
        items = msgspec.json.decode(Path(path).read_bytes(), type=list[Item])
    except OSError as error:
        raise BadFile(f"cannot read prompts from {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"cannot read prompts from {path} as ShareGPT: {error}") from None
    found = tuple(each for item in items if (each := _opening(item.conversations)) is not None)
    if not found:
        raise BadFile(f"no prompts in {path}: no human says anything in its {len(items)} conversations")
    return found


def _opening(turns: list[Turn]) -> Conversation | None:
    """The first human turn and the answer to it."""
    for index, turn in enumerate(turns):
        if turn.speaker in HUMAN and turn.value.strip():
            answers = [each.value for each in turns[index + 1 : index + 2] if each.speaker not in HUMAN]
            return Conversation(turn.value, "".join(answers))
    return None


def why_skipped(prompt: int, answer: int, output: int | None, context: int) -> str | None:
    """ "short", "long", or None for a conversation that is asked; all are numbers of tokens. `output`: what
    is generated whatever the answer was, None for as many as the answer has."""
    if prompt < SHORTEST or (output is None and answer < SHORTEST):
        return "short"
    total = prompt + (answer if output is None else output)
    if prompt > LONGEST_PROMPT or total > min(LONGEST, context):
        return "long"
    return None
