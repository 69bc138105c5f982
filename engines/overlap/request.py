"""A request on its way through the engine. Only the scheduler's thread touches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.api import Request


@dataclass(slots=True, eq=False)
class Active:
    """A request and where it stands. Equal only to itself."""

    request: Request
    prompt: list[int]
    accepted_ns: int
    tokenized_ns: int
    admitted_ns: int = -1
    slot: int = -1  # its place in the future map and in the table of block tables
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # output ids that are on the host
    scheduled: int = 0  # output tokens that steps launched so far will give
    in_flight: int = 0  # launched steps whose result is not on the host yet
    finish_reason: str = ""

    @property
    def context(self) -> int:
        """Tokens that hold a KV slot once every launched step is done, the next input included."""
        return len(self.prompt) + self.scheduled

    @property
    def wants_step(self) -> bool:
        """Whether another decode step can still be of use: not finished, and its length not yet reached by
        what is in flight. A length finish is known ahead, so it never costs a step too many."""
        return not self.finish_reason and self.scheduled < self.request.max_new_tokens
