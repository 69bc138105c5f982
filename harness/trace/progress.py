"""How far reading is, on stderr: one line that is rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.text import Text

from harness.consoles import Console

QUIET_S = 2.0  # between two lines where there is no terminal; a small file says nothing


@contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Show lines while inside."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda line: live.update(Text(line), refresh=True)
        return
    last = time.monotonic()

    def print_now_and_then(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_S:
            last = time.monotonic()
            console.print(f"bench: {line}", soft_wrap=True, markup=False)

    yield print_now_and_then
