"""What host and device process share: command records, the control page, the ring of device work.

Nothing here is negotiated: both sides import this file.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from overlap_bench.engines.pace import Pace

# ---------------------------------------------------------------------------------------------------------
# Commands: 64-byte records in one pipe per stream. A write of up to PIPE_BUF bytes to a pipe is atomic, and a
# pipe of 64 KiB holds 1024 of them: that is the launch queue, and a full one blocks its writer.

RECORD = struct.Struct("<8q")
QUEUE_RECORDS = 1024
PIPE_BYTES = QUEUE_RECORDS * RECORD.size

# Codes below LAUNCH are done by the executor between programs; those from LAUNCH on need the program's turn.
TO_DEVICE = 0  # (code, arena offset, buffer id, buffer offset, bytes)
TO_HOST = 1  # (code, arena offset, buffer id, buffer offset, bytes)
WAIT = 2  # (code, stream index, value)
LAUNCH = 3  # (code | argument count << 8 | fifth argument << 16, program id, step, leaves, four arguments)
KERNEL = 4  # (code,): one leaf module of the launch before it

MAX_ARGUMENTS = 5  # a record of 9 words would not fill the pipe evenly: the fifth shares one with the code
CAPTURED = -1  # in place of `leaves`: runs without asking for KERNEL commands
COUNTED = -2  # the same, and the leaf modules it calls are counted

# ---------------------------------------------------------------------------------------------------------
# The control page, int64 cells. A cell has one writer; an aligned 8-byte store is never seen half done.

MAX_STREAMS = 8
MAX_PROGRAMS = 64
MAX_WAITERS = 16

COMPLETED = 0  # + stream * CELLS_PER_STREAM: commands this stream has completed; written by the device
CELLS_PER_STREAM = 8  # a cache line each: the host reads one while the device writes another
WORK_HEAD = COMPLETED + MAX_STREAMS * CELLS_PER_STREAM  # rows ever written to the work ring; by the device
LEAVES = WORK_HEAD + 8  # + program: leaf modules it calls, -1 while unknown; by the device
WAITERS = LEAVES + MAX_PROGRAMS  # + slot: what a host thread waits for (see `waiting_for`), 0 nothing
PACED = WAITERS + MAX_WAITERS  # programs that had a pace; this and the next two by the device
OVERRAN = PACED + 1  # of these, the ones that computed for longer
LATE_NS = PACED + 2  # how much later than their pace the others ended, together
LAST_WORDS = 4096  # byte offset: why the device process ends and its traceback, NUL-terminated UTF-8
PAGE_BYTES = 8192

_VALUE_BITS = 48


def waiting_for(stream: int, value: int) -> int:
    """The word of a waiter: one int64, so that stream and value are never seen apart. Never 0."""
    return (stream + 1) << _VALUE_BITS | value


def waited_for(word: int) -> tuple[int, int]:
    """(stream, value) of a waiter's word."""
    return (word >> _VALUE_BITS) - 1, word & ((1 << _VALUE_BITS) - 1)


# ---------------------------------------------------------------------------------------------------------
# The ring of device work

WORK_ROW = struct.Struct("<4q")  # kind, step, start_ns, end_ns
WORK_ROWS = 1 << 18  # a step takes about ten rows; older ones are overwritten, and the host counts them
WORK_BYTES = WORK_ROWS * WORK_ROW.size


def make_fence() -> Callable[[], None]:
    """A full memory fence for one thread: no load after it executes before a store ahead of it is visible
    elsewhere, nor is a store after it visible before one ahead of it. 0.25 µs.

    Waiting is Dekker's pattern. The host stores its waiter word, then loads the counter; the device stores
    the counter, then loads the waiter words. Without a fence in between, each may miss the other's store and
    the host would sleep through its event. Python has no fence, but taking and releasing an uncontended lock
    is an atomic acquire and an atomic release. On x86-64 any one of them is a full fence; on AArch64 a
    release followed by an acquire is, hence the second pair. One lock per thread: a shared one could be held
    by a thread that has just lost the GIL.
    """
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()
        acquire()
        release()

    return fence


# ---------------------------------------------------------------------------------------------------------
# The control channel: one request, one answer, each in msgpack over a pipe of multiprocessing


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """All a device process is started with; numbers of inherited file descriptors."""

    control: int
    page: int
    work: int
    arena: int
    arena_bytes: int
    pipes: list[int]  # the reading end, by stream
    wakeups: list[int]  # eventfds, by waiter slot
    core: int | None
    chaos: int | None
    pace: Pace | None
    parent: int
    die_with_parent: bool


class Load(msgspec.Struct, frozen=True, tag="load"):
    build: str
    arguments: dict[str, Any]


class Booted(msgspec.Struct, frozen=True, tag="booted"):
    """The device process is up; `resident` is its memory in bytes before any module."""

    resident: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Buffers and programs of the module: name to (id, bytes), and name to id."""

    buffers: dict[str, tuple[int, int]]
    programs: dict[str, int]
    facts: dict[str, Any]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request failed, the device lives on."""

    usage: bool  # what was asked is wrong: BadSetting, else EngineError
    message: str
    traceback: str


FromDevice = Booted | Loaded | Refused
