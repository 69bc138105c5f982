"""How far a run is, on stderr: one line that is rewritten on a terminal, a line per block elsewhere.

Nothing is drawn between two happenings: a thread that redraws would wake while a round is measured.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from harness.design import Design
from harness.messages import Progress
from harness.runner import BlockBegun, BlockDone, Happening, RoundBegun


class Display:
    """Shows happenings of a run. Use as a context manager, call with each."""

    def __init__(self, design: Design, console: Console) -> None:
        self._design = design
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._seconds: list[float] = []  # of finished blocks
        self._left: int | None = None  # blocks not yet done; known once the first one begins
        self._block = self._round = ""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, happening: Happening) -> None:
        match happening:
            case BlockBegun(block):
                self._begin(block)
            case RoundBegun(_, arm, index):
                self._round = f"{arm}, {f'round {index + 1} of {self._design.rounds}' if index >= 0 else 'warm-up'}"
                self._draw(self._round)
            case Progress(finished=finished, total=total, tpot_ms=tpot):
                live = f", TPOT {tpot:.2f} ms" if tpot is not None else ""
                self._draw(f"{self._round}: {finished} of {total} requests{live}")
            case BlockDone(block, seconds):
                self._end(block, seconds)

    def _begin(self, block: int) -> None:
        if block == -1:
            self._block = "first boot of each arm (discarded)"
        else:
            self._block = f"block {block + 1} of {self._design.blocks}"
            self._left = self._design.blocks - block
        self._draw("booting")
        if block == -1 and self._live is None:
            self._console.print(f"bench: {self._block}", highlight=False)

    def _end(self, block: int, seconds: float) -> None:
        if block == -1:
            return
        self._seconds.append(seconds)
        self._left = self._design.blocks - block - 1
        if self._live is None:
            self._console.print(f"bench: {self._block} done{self._time_left()}", highlight=False)

    def _draw(self, what: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._block}: {what}{self._time_left()}"), refresh=True)

    def _time_left(self) -> str:
        if not self._seconds or self._left is None:
            return ""
        return f", {self._left * sum(self._seconds) / len(self._seconds):.0f} s left"
