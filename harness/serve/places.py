"""Requests on their way into the engine: how many there are, what they hold, and what ends them early.

Each is read, checked and tokenized inside a place of its own, and whatever happens there, the place is free
again behind it. Reading has a time limit: else a client that sends half a request would have its place for
ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from harness.serve.parsing import Refused

MOST_HELD = 256 << 20  # bytes of all bodies together
READING_S = 30
RETRY_S = 1  # for a client that was turned away because the server is full
FULL = "full"


@dataclass(slots=True, eq=False)
class Place:
    """One request's. `end` raises an error inside of it."""

    _places: Places
    _limit: asyncio.Timeout
    _held: int = 0
    why: Exception = field(
        default_factory=lambda: Refused(408, f"no whole request came within {READING_S} s")
    )

    def hold(self, count: int) -> None:
        """That many bytes more. Raises Refused where all places together hold too many."""
        self._held += count
        self._places.held += count
        if self._places.held > MOST_HELD:
            raise Refused(429, "other requests are too large for one more now", FULL, RETRY_S)

    def read(self) -> None:
        """The request is there: no time limit any more."""
        self._limit.reschedule(None)

    def end(self, why: Exception) -> None:
        if not self._limit.expired():
            self.why = why
            self._limit.reschedule(asyncio.get_running_loop().time())

    def leave(self) -> None:
        self._places.held -= self._held
        self._places.taken.discard(self)


class Places:
    def __init__(self) -> None:
        self.taken: set[Place] = set()
        self.held = 0  # bytes

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Place]:
        """Raises what the place was ended with."""
        limit = asyncio.timeout(READING_S)
        place = Place(self, limit)
        self.taken.add(place)
        try:
            async with limit:
                yield place
        except TimeoutError:
            if limit.expired():
                raise place.why from None
            raise
        finally:
            place.leave()

    def end(self, why: Exception) -> None:
        """All of them."""
        for place in self.taken:
            place.end(why)
