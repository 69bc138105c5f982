"""Where lines go. A reader may leave, as `head` does: that ends neither a run nor changes its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import rich.console


class Console(rich.console.Console):
    """rich's own ends the process with 1, which of a gate would mean that it failed."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)


@contextmanager
def readable() -> Iterator[None]:
    """Inside, stdout is written to; afterwards nothing of it is left that could fail at the end."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)


def discard(stream: IO[str]) -> None:
    """What is still buffered, and all that comes, is written to where it is thrown away."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
