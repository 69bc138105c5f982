"""What the runner and the load generator say to each other: msgspec structs, as msgpack over ZeroMQ. From
BlockBegun on: dataclasses by which a run tells an observer how far it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlap_bench.engines.api import STAMPS
from overlap_bench.harness.plan.design import Design
from overlap_bench.harness.workload.plan import Planned

# Columns of RequestTable.rows, all int64; stamps are perf_counter_ns, -1 where something did not happen.
REQUEST_COLUMNS = (
    "request",
    "scheduled_ns",  # due; in closed loop: when a place became free
    "sent_ns",  # just before the send call; to a server's socket where the engine is a server's client
    "submitted_ns",  # just after it returned
    *STAMPS,  # the engine's
    "finished_ns",  # arrival of the end at the client, whether a finish or an error
    "prompt_tokens",
    "completion_tokens",
    "chunks",  # how many of the entries of chunk_ns and chunk_tokens are this request's
    "tokens",  # how many of the entries of token_ns are this request's
    "ids",  # how many of the entries of token_ids are this request's
)


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All a load generator needs, as JSON: `python -m overlap_bench.harness.run.load_generator CONFIG`.

    Addresses are ZeroMQ endpoints. It binds `events` (PULL, from engines) and `inbox` (PULL, from the
    runner), and connects `replies` (PUSH, to the runner).
    """

    events: str
    inbox: str
    replies: str
    stall_s: float = 60.0  # requests in flight and no event for so long: the engine is taken for dead
    parent: int = msgspec.field(default_factory=os.getpid)  # whoever made the config, and with whom it dies


class RunRound(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Send `plan` to the hosts whose inboxes are `targets`, and record what comes back. Of several, each gets
    an equal share of the plan, in its order: the first half of it goes to the first of two.

    A request without a due time (offset UNTIMED) goes out when a place is free, where `concurrency` is set;
    else `interval_ns` after the request before it was sent.
    """

    targets: list[str]
    plan: list[Planned]
    concurrency: int | None
    interval_ns: int


class LoadReady(msgspec.Struct, frozen=True, tag="ready"):
    """Rounds may be asked for."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a round is; two a second, which are also a sign of life."""

    finished: int
    total: int
    tpot_ms: float | None  # median of the requests finished so far


class RequestTable(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded of a round's requests, in the order in which they were sent.

    `rows` is an int64 matrix, row-major, with REQUEST_COLUMNS. Lists of different lengths lie flat, one
    request after the other, as int64: `chunk_ns` (arrival of each chunk at the client), `chunk_tokens` (its
    tokens; -1 where they can't be told), `chunk_lag_ns` (from its arrival to its reading; -1 where only the
    latter is known), `token_ns` (when the engine had each token), `token_ids` (none of text).
    """

    rows: bytes
    chunk_ns: bytes
    chunk_tokens: bytes
    chunk_lag_ns: bytes
    token_ns: bytes
    token_ids: bytes
    reasons: list[str]  # "" for a request that failed
    # BLAKE2b-128, hexadecimal, of the token ids as little-endian int64, or of the text where there are none
    digests: list[str]
    errors: list[str]  # "" for a request that did not fail


class RoundDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    started_ns: int  # offset 0 of the plan
    ended_ns: int  # arrival of the last end
    data: RequestTable


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The load generator is about to end."""

    message: str
    traceback: str = ""


FromLoad = LoadReady | Progress | RoundDone | LoadFailed


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
    A cluster's run has no such event."""

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
    | Progress
)
Observer = Callable[[Event], None]
