"""What the harness and an engine's host say to each other, by direction. An engine never sees these: its host
(engines/host.py) turns them into calls of its methods."""

from __future__ import annotations

import os

import msgspec

from overlap_bench.engines.api.contract import Description, EngineOptions, Request
from overlap_bench.engines.api.records import RoundRecord, TurnTable


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All a host needs; passed as one JSON argument: `python -m overlap_bench.engines.host CONFIG`.

    Addresses are ZeroMQ endpoints. The host binds `inbox` (PULL) and connects `replies` and `events` (PUSH).
    """

    name: str  # the arm, for messages: "before", "after"
    build: str  # EngineSpec.build: another interpreter need not have the engine's entry point installed
    options: EngineOptions
    toggles: dict[str, str]
    inbox: str
    replies: str
    events: str
    baton: str = ""  # the FIFO that this engine is handed the baton in; "": it never is
    parent: int = msgspec.field(default_factory=os.getpid)  # whoever made the config; the host dies with it


# ---------------------------------------------------------------------------------------------------------
# To the host


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    request: Request


class BeginRound(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    pass


class BeginProfile(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    steps: int


class BeginTurns(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """From now on, run only while you hold the baton: `steps` steps, then pass it to the FIFO `next`. `arms`
    take turns; the first turn comes once each has its `requests` requests. `run`: the pids of all that the
    measurement is made of. `delays`: of each turn in its order, the phase in which its steps are delayed (""
    for none), and for how many ns each; from the first again where there are more turns."""

    steps: int
    requests: int
    next: str
    arms: int
    run: list[int] = []
    delays: list[tuple[str, int]] = []


class EndTurns(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    pass


class Collect(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    pass


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    pass


ToHost = Submit | BeginRound | BeginProfile | BeginTurns | EndTurns | Collect | Stop


# ---------------------------------------------------------------------------------------------------------
# From the host


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    name: str
    description: Description
    origin: str = ""  # the file that the engine's code was found in


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """BeginRound, BeginProfile or BeginTurns was carried out: the requests may be sent."""

    name: str


class Parked(msgspec.Struct, frozen=True, tag="parked"):
    """All requests of its turns have come, and it waits for the baton."""

    name: str


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """It has waited for the baton far longer than a turn takes."""

    name: str
    seconds: float


class Collected(msgspec.Struct, frozen=True, tag="collected"):
    name: str
    record: RoundRecord
    turns: TurnTable | None = None  # since BeginTurns, where there was one


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The host stops its engine now, and ends. `usage`: what was asked is wrong (exit 2), else it broke
    (exit 4)."""

    name: str
    message: str
    usage: bool
    traceback: str = ""
    died: list[int] = []  # of Description.pids, what had ended before the engine was stopped


FromHost = Ready | Begun | Parked | Waiting | Collected | Failed
