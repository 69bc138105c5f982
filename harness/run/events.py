"""What a run tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.run import messages


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """A block is about to boot; -1 is the discarded one. `left`: blocks that are not done yet, at most."""

    block: int
    left: int


@dataclass(frozen=True, slots=True)
class Booting:
    """Arms have been booting for so long; `log` is the file of what the first of them prints."""

    arms: tuple[str, ...]
    seconds: float
    log: Path


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """A round of an arm is about to start; a negative index is a warm-up."""

    block: int
    arm: str
    index: int


@dataclass(frozen=True, slots=True)
class SegmentBegun:
    """All arms are about to serve one set of requests in turns."""

    block: int
    index: int


@dataclass(frozen=True, slots=True)
class BlockDone:
    """A block is on disk (or, -1, thrown away); it took `seconds`, and in its worst round other virtual
    machines took the share `stolen` of the CPU time."""

    block: int
    seconds: float
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a block will take, in seconds, by the one that was thrown away, and the design as it is now sized.
    Of a cluster nobody says so."""

    seconds: float
    design: Design


@dataclass(frozen=True, slots=True)
class NodeDone:
    """A block came from a node of a cluster, and is on disk; `left` are not done yet, at most, and `at_work`
    of them are being measured. The rest as of BlockDone."""

    block: int
    node: str
    seconds: float
    stolen: float
    left: int
    at_work: int


@dataclass(frozen=True, slots=True)
class SoFar:
    """What the primary shows after some blocks of a run that goes on: a change, or a delta in the metric's
    unit, with its 95% interval, in words. No verdict."""

    blocks: int
    found: str


@dataclass(frozen=True, slots=True)
class Said:
    """A line that a person should see."""

    line: str


Event = (
    BlockBegun
    | Booting
    | RoundBegun
    | SegmentBegun
    | BlockDone
    | Foreseen
    | NodeDone
    | SoFar
    | Said
    | messages.Progress
)
Observer = Callable[[Event], None]
