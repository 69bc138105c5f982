"""What the runner and the load generator say to each other: msgspec structs, as msgpack over ZeroMQ."""

from __future__ import annotations

import os

import msgspec

from overlap_bench.engines.api import STAMPS
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

    round_id: int
    targets: list[str]
    plan: list[Planned]
    concurrency: int | None
    interval_ns: int


class LoadReady(msgspec.Struct, frozen=True, tag="ready"):
    """Rounds may be asked for."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a round is; two a second, which are also a sign of life."""

    round_id: int
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
    round_id: int
    started_ns: int  # offset 0 of the plan
    ended_ns: int  # arrival of the last end
    data: RequestTable


class LoadFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The load generator is about to end."""

    message: str
    traceback: str = ""


FromLoad = LoadReady | Progress | RoundDone | LoadFailed
