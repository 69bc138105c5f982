"""How far a run is, on stderr: one line that is rewritten on a terminal, a line per trial elsewhere.

Nothing is drawn between two events: a thread that redraws would wake while a round is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.live import Live
from rich.text import Text

from overlap_bench.harness.common.consoles import Console
from overlap_bench.harness.common.formatting import blocks_of
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.plan.variants import load_variants
from overlap_bench.harness.run.messages import (
    BlockBegun,
    BlockDone,
    Booting,
    Event,
    Foreseen,
    NodeDone,
    Observer,
    Progress,
    RoundBegun,
    Said,
    SegmentBegun,
    SoFar,
)

Write = Callable[[str], object]
QUIET_S = 2.0  # between two lines of reading where there is no terminal; a small file says nothing
PATIENCE_S = 10.0  # of a boot, before a line says that it goes on; then as long again as it took so far
MUCH_STOLEN = 0.1  # of the CPU time, in a round: a change of some percent will not be seen


@contextmanager
def on_stderr(folder: Path, design: Design) -> Iterator[Observer]:
    """Show a run's events while inside."""
    console = Console(stderr=True)
    say = printed_on(console)
    say(f"writing to {folder}")
    if about := question(design):
        say(about)
    if design.aim_s is not None:
        say(f"{blocks_of(design.blocks)}, sized by the first boots so that the answer comes in 90 s")
    if not console.is_terminal:
        yield Display(design, say, plain=say)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield Display(design, say, redraw=lambda line: live.update(Text(line), refresh=True))


def printed_on(console: Console, start: str = "bench") -> Write:
    """Prints lines there as they are: an engine's error may have [/brackets]."""
    return lambda line: console.print(f"{start}: {line}", soft_wrap=True, markup=False)


def among_others(name: str) -> Callable[[Path, Design], AbstractContextManager[Observer]]:
    """Print the lines of a run that is measured beside others, each after its name."""

    @contextmanager
    def shown(folder: Path, design: Design) -> Iterator[Observer]:
        say = printed_on(Console(stderr=True), f"bench: {name}")
        yield Display(design, say, plain=say)

    return shown


def question(design: Design) -> str | None:
    """What a variant is compared for, and who says so; None for a pair that has no name."""
    variant = load_variants().get(design.name)
    return None if variant is None else f"{variant.name}: {variant.title} ({variant.source})"


@contextmanager
def of_reading() -> Iterator[Callable[[str], None]]:
    """Show how far a file is read while inside: now and then where there is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda line: live.update(Text(line), refresh=True)
        return
    say, last = printed_on(console), time.monotonic()

    def print_now_and_then(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_S:
            last = time.monotonic()
            say(line)

    yield print_now_and_then


class Display:
    """Turns events into lines: `say` gets what a person should see, `redraw` each state of one line,
    `plain` a line for each trial."""

    def __init__(
        self, design: Design, say: Write, redraw: Write = lambda line: None, plain: Write = lambda line: None
    ) -> None:
        self._design, self._say, self._redraw, self._plain = design, say, redraw, plain
        self._seconds: list[float] = []  # of finished blocks
        self._foreseen_s: float | None = None  # of one, by the first boots
        self._left = 0  # blocks not yet done
        self._at_once = 1  # blocks under way
        self._in_turns = False
        self._began = time.monotonic()
        self._told_s = 0.0  # how long a boot had taken when a line last said so
        self._block = self._round = self._arm = self._so_far = ""
        self._first: (
            dict[str, float] | None
        ) = {}  # TPOT of each arm in the first boots, ms; None: it was told

    def __call__(self, event: Event) -> None:
        match event:
            case BlockBegun(block, left):
                self._block = self._named(block)
                self._left = left
                self._told_s = 0.0
                self._show("booting")
            case Booting(arms, seconds, log):
                what = f"booting {' and '.join(arms)}, {seconds:.0f} s"
                self._show(f"{what}; its log: {log}")
                if seconds >= max(PATIENCE_S, 2 * self._told_s):
                    self._told_s = seconds
                    self._plain(f"{what}; its log: {log}")
            case RoundBegun(_, arm, index):
                which = f"round {index + 1} of {self._design.rounds}" if index >= 0 else "warm-up"
                self._round, self._arm = f"{arm}, {which}", arm
                self._in_turns = False
                self._show(self._round)
            case SegmentBegun(_, index):
                self._in_turns = True
                planned = self._design.segments
                which = (
                    f"{index + 1} of {planned}"
                    if index < planned
                    else f"{index + 1 - planned} more, as other processes use the cores"
                )
                self._show(f"interleaved round {which}")
            case Progress() if self._in_turns:
                pass  # its requests all end with it: "0 of 32 requests" would be all that is seen of them
            case Progress(finished=finished, total=total, tpot_ms=tpot):
                live = f", TPOT {tpot:.2f} ms" if tpot is not None else ""
                if tpot is not None:
                    self._tell_first(tpot)
                self._show(f"{self._round}, {finished} of {total} requests{live}")
            case Foreseen(seconds, design):
                self._design, self._foreseen_s = design, seconds
            case SoFar(blocks, found):
                self._so_far = f" | so far, no verdict yet: {found}"
                self._plain(f"after {blocks_of(blocks)}, no verdict yet: {found}")
            case Said(line):
                self._say(line)
            case BlockDone(block, seconds, stolen):
                self._first = None  # from here on, what is seen counts
                if block >= 0:
                    self._seconds.append(seconds)
                    self._left -= 1
                self._plain(f"{self._block} done in {seconds:.0f} s{self._time_left()}")
                self._tell_stolen(stolen)
            case NodeDone(block, node, seconds, stolen, left, at_work):
                self._seconds.append(seconds)
                self._block, self._left, self._at_once = self._named(block), left, max(1, at_work)
                self._plain(f"{self._block} done on {node} in {seconds:.0f} s{self._time_left()}")
                self._tell_stolen(stolen)
                self._show(f"done on {node}, {at_work} under way")

    def _named(self, block: int) -> str:
        most = "at most " if self._design.may_end_early else ""
        return (
            "first boots (discarded)" if block == -1 else f"trial {block + 1} of {most}{self._design.blocks}"
        )

    def _tell_first(self, tpot_ms: float) -> None:
        """Tell that every arm serves, as soon as it does."""
        if self._first is None:
            return
        self._first[self._arm] = tpot_ms
        if len(self._first) == len(self._design.arms):
            each = ", ".join(f"{arm} {ms:.2f} ms" for arm, ms in self._first.items())
            self._say(f"a first look, at boots that do not count: TPOT p50 {each}")
            self._first = None

    def _tell_stolen(self, stolen: float) -> None:
        """In time to stop, and to come back when the machine is quieter."""
        if stolen > MUCH_STOLEN:
            self._say(f"{self._block}: {stolen:.0%} of the CPU time went to other virtual machines")

    def _show(self, what: str) -> None:
        self._redraw(f"{self._block}: {what}{self._time_left()}{self._so_far}")

    def _time_left(self) -> str:
        if self._seconds:
            each = sum(self._seconds) / len(self._seconds)
        elif self._foreseen_s is not None:
            each = self._foreseen_s
        else:
            return ""
        most = "at most " if self._design.may_end_early else ""
        seconds = self._left * each / self._at_once
        if self._design.max_minutes is not None:
            ends = self._began + 60 * self._design.max_minutes
            seconds = min(seconds, max(0.0, ends - time.monotonic()))
        return f", {most}{seconds:.0f} s left"
