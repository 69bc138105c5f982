"""What an engine may record of a round, beside its events: steps, device work, counters, memory, a profile.

All of it is optional: what is absent here, no metric is made of.
"""

from __future__ import annotations

import msgspec

# The phases of a step on the host, in the order in which a step goes through them.
PHASES = (
    "recv",
    "schedule",
    "metadata",
    "h2d",
    "launch",
    "wait.launch_done",
    "wait.copy_done",
    "append",
    "output",
)
STEP_KINDS = ("prefill", "decode", "mixed")
STEP_COLUMNS = (
    *("step", "kind", "batch", "tokens", "dropped", "preempted", "given"),
    *(f"{phase}.{edge}" for phase in PHASES for edge in ("start", "end")),
)


class StepTable(msgspec.Struct, frozen=True):
    """Step records of one round as one int64 matrix, row-major; -1 means "did not happen".

    Columns, all of STEP_COLUMNS: "step", "kind" (index into STEP_KINDS), "batch" (requests), "tokens" (fed to
    the model), "dropped" (rows whose result was not wanted any more), "preempted" (requests that lost their
    blocks to others), "given" (tokens that its requests got; -1: one each), and for each of PHASES the stamps
    "<phase>.start" and "<phase>.end". A round with impossible records (a step number twice, a phase that ends
    before it starts, stamps that are no perf_counter_ns of the round) fails the run.
    """

    columns: list[str]
    rows: int
    data: bytes


class DeviceWork(msgspec.Struct, frozen=True):
    """What the device did in one round, for busy time and copies: int64 rows (kind, step, start_ns, end_ns).

    kind: 0 program, 1 host-to-device copy, 2 device-to-host copy. Programs of one step that run side by side
    count once in its device time.

    An engine whose model spans several devices records those of its first rank as its device work, and of
    each other rank the programs, under the same step numbers.
    """

    rows: int
    data: bytes


class HostRanges(msgspec.Struct, frozen=True, kw_only=True):
    """What the threads of one process did in a round, one by one: int64 rows (thread, name, step, start_ns,
    end_ns), in the order in which they ended.

    thread is the kernel's id; name an index into `names`. On a thread, ranges nest or are disjoint.
    """

    role: str  # as in Description.pids
    pid: int
    threads: dict[int, str]
    names: list[str]
    rows: int
    data: bytes


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine recorded in addition, in a round that `begin_profile` began.

    `opened_ns` to `closed_ns` is what was marked as steady decode; -1 if never opened, or never closed.
    `streams` says on which stream of the device each kind of work runs, by "program", "h2d", "d2h".
    """

    opened_ns: int
    closed_ns: int
    hosts: list[HostRanges]
    streams: dict[str, str]


TURN_COLUMNS = ("parked_ns", "parked_cpu_ns", "taken_ns", "drained_ns", "others_ns", "delayed_ns")


class TurnTable(msgspec.Struct, frozen=True):
    """An engine's turns with the baton, as its host saw them: int64 rows of TURN_COLUMNS. How long it was
    parked before, and the CPU time that its processes used meanwhile; when it took the baton, and when all
    that it began was finished; in between, the CPU time that processes which are not the run's took of its
    cores (-1: not told), and what BeginTurns.delays took. The host of an older commit sends the first four.
    """

    rows: int
    data: bytes


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All an engine recorded between begin_round and collect. Engines without step records leave it empty."""

    steps: StepTable | None = None
    device_work: DeviceWork | None = None
    other_ranks: list[DeviceWork] = []  # programs alone, of each rank behind the first
    counters: dict[str, int] = {}  # mechanism counters: what the toggles did in this round
    memory: dict[str, int] = {}  # bytes: "device_peak", "pinned_peak"
    profile: Profile | None = None
    # Of a round with delays (Engine.delay): the phases that are no step's columns, as other threads or
    # processes did them, each one of `names`.
    beside: list[HostRanges] = []
