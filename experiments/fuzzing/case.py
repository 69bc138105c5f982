"""What a fuzzed target is, and what counts as its failure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any, Generic, TypeVar

LIMIT_S = 5.0  # longer than any one case may take
Case = TypeVar("Case")


class Broken(Exception):
    """A case that shows a fault: of which kind, and what was seen."""

    def __init__(self, kind: str, seen: str) -> None:
        super().__init__(kind, seen)
        self.kind = kind
        self.seen = seen


class Gone(Broken):
    """What is tried has died: no further case means anything."""


class TooLong(BaseException):
    """The limit is over. No Exception: nothing that is tried may swallow it."""


@dataclass(frozen=True, slots=True)
class Target(Generic[Case]):
    """`attempt` says in a word or two how a case ended, and raises Broken; `settle` looks for what only shows
    after many."""

    make: Callable[[Random], Case]
    attempt: Callable[[Case], str]
    settle: Callable[[], None]
    rss: Callable[[], int]  # bytes, of all that is tried


Open = Callable[[], AbstractContextManager[Target[Any]]]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TooLong inside once the time is over; in the main thread alone."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, where a library's callback swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
