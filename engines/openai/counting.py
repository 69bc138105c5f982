"""How many tokens a reply holds, and each of its chunks, by what the server says of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from overlap_bench.engines.openai import lenient

# In the content of servers that do not tell a thought apart.
THOUGHT_MARKS = ("think>", "THINK]", "channel|>")
LIKELY_BYTES = 3  # of text per token, at least; most have four or more

Tokens = Callable[[str], int]  # how many a text has


@dataclass(slots=True)
class Piece:
    """One chunk that holds a token: which event it is, the index of the piece that completed it, and what it
    said of itself."""

    place: int
    index: int
    text: str
    thought: bool  # whether some of the text is one
    ids: list[int] | None
    logprobs: int | None  # how many
    completed: int | None  # usage so far


@dataclass(slots=True)
class Usage:
    """What the server counted, each as it said last. Tokens that are not streamed: `reasoning`, where the
    thought is hidden, and `rejected`, of a prediction that the client sent along."""

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    reasoning: int = 0
    rejected: int = 0

    def take(self, said: dict[str, Any]) -> int | None:
        """The completion's tokens so far, where this says."""
        details = lenient.member(said, "completion_tokens_details")
        completion = lenient.count(said.get("completion_tokens"))
        self.prompt = _last(self.prompt, said.get("prompt_tokens"))
        self.completion = _last(self.completion, completion)
        self.total = _last(self.total, said.get("total_tokens"))
        reasoning = details.get("reasoning_tokens", said.get("reasoning_tokens"))  # SGLang has it outside
        self.reasoning = _last(self.reasoning, reasoning) or 0
        self.rejected = _last(self.rejected, details.get("rejected_prediction_tokens")) or 0
        return completion

    @property
    def made(self) -> int | None:
        """All tokens of the completion. Some servers (xAI's) leave the thought out of `completion`."""
        if self.completion is None or not self.reasoning or self.prompt is None:
            return self.completion
        apart = self.total == self.prompt + self.completion + self.reasoning
        return self.completion + (self.reasoning if apart else 0)


def _last(known: int | None, said: Any) -> int | None:
    found = lenient.count(said)
    return known if found is None else found


@dataclass(frozen=True, slots=True)
class Counted:
    """How tokens were counted, those of each chunk (-1: the server tells only their sum), and all that came;
    see replies.Outcome for the others."""

    by: str
    counts: list[int]
    total: int
    hidden: int = 0
    doubtful: bool = False


def count(pieces: Sequence[Piece], usage: Usage, tokens: Tokens | None) -> Counted:
    """The best that every chunk has: token ids, logprobs, a usage that grows from chunk to chunk, the usage
    at the end where it equals the number of chunks, a tokenizer; then that usage, which says of no chunk what
    is in it.

    A server's sum may hold tokens that it does not stream. They are what it says (reasoning_tokens) where no
    thought is to be seen, and, where the tokens of each chunk are known, what these lack. A sum that is less
    than the chunks with a token, as where each tells only its own, is none.
    """
    told = usage.made
    if told is not None and told < len(pieces) - _few(len(pieces)):
        told = None
    hidden = _hidden(pieces, usage, told)
    counts: list[int] | None = None
    if pieces and all(piece.ids for piece in pieces):
        counted_by, counts = "ids", [len(piece.ids or ()) for piece in pieces]
    elif pieces and all(piece.logprobs for piece in pieces):
        counted_by, counts = "logprobs", [piece.logprobs or 0 for piece in pieces]
    elif told is not None and pieces and all(piece.completed for piece in pieces):
        so_far = [hidden, *(piece.completed or 0 for piece in pieces)]
        counts = [max(0, after - before) for before, after in pairwise(so_far)]
        doubtful = counts[0] > len(pieces[0].text.encode()) > 0
        return Counted("usage", counts, told - hidden, hidden, doubtful)
    elif tokens is not None and (told is None or told - hidden != len(pieces)):
        # Each by itself: a chunk ends where a token does, and encoding all at once would merge some tokens.
        counted_by, counts = "tokenizer", [tokens(piece.text) for piece in pieces]
    if counts is not None:
        came = sum(counts)
        if told is None or told > came + _few(came):
            return Counted(counted_by, counts, came, 0 if told is None else told - came)
        return Counted(counted_by, counts, told)
    if told is None:
        return Counted("chunks", [1] * len(pieces), len(pieces))
    came = told - hidden
    if came == len(pieces):
        return Counted("usage", [1] * len(pieces), came, hidden)
    text_bytes = sum(len(each.text.encode()) for each in pieces)
    doubtful = came > len(pieces) and LIKELY_BYTES * came > text_bytes > 0
    return Counted("usage", [-1] * len(pieces), came, hidden, doubtful)


def _hidden(pieces: Sequence[Piece], usage: Usage, told: int | None) -> int:
    """Tokens that the server says it made and did not stream."""
    if told is None or any(piece.thought for piece in pieces):
        return 0
    hidden = min(told, usage.reasoning + usage.rejected)
    text = "".join(piece.text for piece in pieces)
    shown = told - hidden < len(pieces) - _few(len(pieces)) or any(mark in text for mark in THOUGHT_MARKS)
    return 0 if shown else hidden


def _few(count: int) -> int:
    """By how many a server's count may differ: a token that ends the text, or one that two chunks share."""
    return max(1, count // 10)
