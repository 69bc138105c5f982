"""A request on its way through the engine. Only the scheduler's thread touches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlap_bench.engines.api import Request, Score
from overlap_bench.engines.overlap.layout import NO_TARGET

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Active:
    """A request and where it stands. Equal only to itself.

    `context` counts its tokens up to the newest one, which the next step feeds: the prompt, and what launched
    steps will have given (under speculation: at most). It ends at `limit`, so a length finish is known ahead
    and never costs an extra step.
    """

    request: Request
    prompt: list[int]
    accepted_ns: int
    tokenized_ns: int
    queued_ns: int = -1
    admitted_ns: int = -1
    slot: int = NO_SLOT  # its place in the future map and in the table of block tables
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # output ids that are on the host
    scores: list[Score] = field(default_factory=list)  # of its forced tokens, as far as they are on the host
    context: int = field(init=False)
    limit: int = field(init=False)
    left: int = 0  # tokens of a prompt in chunks that no launched step has run yet
    in_flight: int = 0  # launched steps whose result is not on the host yet
    finish_reason: str = ""
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    cached_blocks: int = 0  # blocks it found in the prefix cache when it was prefilled
    kept_blocks: int = 0  # blocks of it that are in the prefix cache

    def __post_init__(self) -> None:
        self.context = len(self.prompt)
        self.limit = len(self.prompt) + self.request.max_new_tokens

    @property
    def target(self) -> int:
        """The token that the next step is forced to give, or NO_TARGET."""
        forced = self.request.forced
        return forced[self.context - len(self.prompt)] if forced else NO_TARGET

    @property
    def known(self) -> int:
        """Its tokens that are on the host."""
        return len(self.prompt) + len(self.tokens)

    @property
    def most_kv_tokens(self) -> int:
        """The most tokens that it can ever need KV slots for; its last one is never fed back."""
        return self.limit - 1
