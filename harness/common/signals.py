"""What ends a run from outside, on its way through typer, which would swallow it and what it carries."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)  # a job that is cancelled, a terminal that is closed


class Ended(KeyboardInterrupt):
    """One of `ENDING`. Whatever cleans up after a Ctrl-C does so after these too."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__()
        self.by = by


class Interrupted(Exception):
    """Ctrl-C, or one of `ENDING`; the message says what is kept."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def interruptible() -> Iterator[None]:
    """A Ctrl-C inside is raised as Interrupted, and so is each of `ENDING`, unless it is ignored, as SIGHUP
    is under `nohup`."""
    taken = [each for each in ENDING if _in_main_thread() and signal.getsignal(each) == signal.SIG_DFL]
    for each in taken:
        signal.signal(each, _end)
    try:
        yield
    except KeyboardInterrupt as error:
        raise _interrupted(error) from error
    except OSError as error:  # a closed terminal takes no last line
        if isinstance(error.__context__, Ended):
            raise _interrupted(error.__context__) from error
        raise
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, a Ctrl-C and each of `ENDING` are ignored, so that no clean-up stops half way."""
    every = (signal.SIGINT, *ENDING) if _in_main_thread() else ()
    previous = {each: signal.signal(each, signal.SIG_IGN) for each in every}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, a Ctrl-C and each of `ENDING` waits for the end of this. For what must not be left half done, a
    process that runs and that nobody knows of yet; a signal that is blocked, or ignored, would be so in the
    process too."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    every = (signal.SIGINT, *ENDING) if _in_main_thread() else ()
    taken = [each for each in every if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, remember) for each in taken}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(signal.Signals(came[0]))


def notes(error: BaseException) -> list[str]:
    """What was added to an error on its way: how to go on, and the like."""
    return list(getattr(error, "__notes__", []))


def _interrupted(error: KeyboardInterrupt) -> Interrupted:
    by = error.by if isinstance(error, Ended) else signal.SIGINT
    said = "interrupted" if by == signal.SIGINT else f"ended by {by.name}"
    return Interrupted("; ".join([said, *notes(error)]), 128 + by)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(signal.Signals(number))


def _in_main_thread() -> bool:
    """Only there may a handler be set."""
    return threading.current_thread() is threading.main_thread()
