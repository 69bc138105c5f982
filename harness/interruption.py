"""Ctrl-C on its way through typer, which would swallow it and what it carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(Exception):
    """Ctrl-C; the message says what is kept."""


@contextmanager
def interruptible() -> Iterator[None]:
    """A Ctrl-C inside is raised as Interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted("; ".join(["interrupted", *notes(error)])) from error


def notes(error: BaseException) -> list[str]:
    """What was added to an error on its way: how to go on, and the like."""
    return list(getattr(error, "__notes__", []))
