"""Where output goes. A reader may leave, as `head` does: that neither ends a run nor alters its exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from overlap_bench.harness.common.formatting import visible

WIDTH = 80
TRAILING = re.compile(" +$", re.MULTILINE)


class Console(rich.console.Console):
    """Numbers keep their colour; and a broken pipe is no exit code 1, as rich has it: for a gate, that would
    mean that it failed."""

    def __init__(self, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)
        if not self.width:  # COLUMNS=0: not known
            self.width = WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        """A line of a file or a pipe ends where its text does, and not where its table's last column does."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as printed:
            super().print(*objects, **options)
        super().print(Text(TRAILING.sub("", printed.get())), end="", soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Nothing that is printed here can move the cursor, whatever a name in it holds."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)


@contextmanager
def readable() -> Iterator[None]:
    """For writing to stdout: it is flushed at the end, so that nothing is left that could fail at exit."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)


def discard(stream: IO[str]) -> None:
    """Send what is still buffered in the stream, and all that is yet to come, to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
