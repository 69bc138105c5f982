"""share: how a step's metadata reaches the other ranks, where a model spans several devices.

Before (`pickle`): the batch is pickled once, and sent to each rank as a message over ZeroMQ. After (`ring`):
its arrays are written once into a slot of shared memory that all ranks read in place, and each rank is woken
by an eventfd; no bytes go through the kernel, no thread passes them on.

Claim: vLLM 5399 took the broadcast of pickled inputs from gloo to such a ring, 6183 kept ZeroMQ for what is
too large for it.

What can go wrong: a slot that is written again before every rank is done with it gives that rank another
step's metadata. So a rank gives each slot back, and the writer waits for it: for all ranks, as the slowest
one may be steps behind. (vLLM 27858 is a race of such a ring, 53217 one of buffers sent without a copy.)
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from overlap_bench.engines.api import EngineError, Toggle

if TYPE_CHECKING:  # the declaration below is read by command lines that must not wait for numpy
    from overlap_bench.engines.overlap.batch import Batch

MOST_RANKS = 8
SEVERAL = tuple(str(ranks) for ranks in range(2, MOST_RANKS + 1))

TOGGLE = Toggle(
    name="share",
    module=__name__,
    choices=("pickle", "ring"),
    changes="how a step's metadata reaches the other ranks: pickled, in a message to each, or written once "
    "into a ring in shared memory",
    source="vLLM 5399, 6183",
    requires={"*": {"ranks": SEVERAL}},
    counters=("share_ns", "shared_steps", "shared_bytes", "ring_full_ns"),
    phases=("metadata",),
)

GONE_MS = 1000  # after which a rank that takes no message is taken to be gone
SLOTS = 4
HEADER_BYTES = 16 << 10  # of a slot, before its arrays
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank is told: to run a step, or an order."""

    number: int
    batch: Batch | None  # without its requests: they are the first rank's affair
    order: str = ""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a rank finds what is sent to it: plain data, and the descriptors that it inherits."""

    address: str = ""
    ring: int = -1
    slot_bytes: int = 0
    filled: int = -1
    free: int = -1

    @property
    def inherited(self) -> tuple[int, ...]:
        return tuple(each for each in (self.ring, self.filled, self.free) if each >= 0)


class Pickled:
    """Before."""

    def __init__(
        self, others: int, step_bytes: int, counters: dict[str, int], check: Callable[[], None]
    ) -> None:
        import zmq

        self.counters = counters
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gone = zmq.Again
        self._sockets = [self._context.socket(zmq.PUSH) for _ in range(others)]
        self.ends = []
        for socket in self._sockets:
            address = f"ipc://@overlap-rank-{secrets.token_hex(8)}"  # no file: nobody has to remove it
            socket.sndhwm = 0
            socket.sndtimeo = GONE_MS
            socket.bind(address)
            self.ends.append(Ends(address=address))

    def send(self, number: int, batch: Batch) -> None:
        began = perf_counter_ns()
        body = self._send(Told(number, replace(batch, requests=())))
        _count(self.counters, began, len(body))

    def order(self, what: str) -> None:
        self._send(Told(-1, None, what))

    def _send(self, told: Told) -> bytes:
        body = pickle.dumps(told, pickle.HIGHEST_PROTOCOL)
        for socket in self._sockets:
            try:
                socket.send(body)
            except self._gone:
                from overlap_bench.engines.devices.base import RANK_LOST

                raise EngineError(f"{RANK_LOST}: nobody takes its messages any more") from None
        return body

    def close(self) -> None:
        self._context.destroy(linger=0)


class Unpickled:
    """Before, at the other end."""

    def __init__(self, ends: Ends) -> None:
        import zmq

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        self._socket.connect(ends.address)

    def receive(self) -> Told:
        """The next; blocks until there is one."""
        told: Told = pickle.loads(self._socket.recv())
        return told

    def done(self) -> None:
        """Nothing that came with the last one is read any more."""


class Ring:
    """After. A slot holds a header, then the arrays one after another, each on a multiple of 8 bytes. Two
    counting eventfds go with each rank: slots that are filled, and slots that are free."""

    def __init__(
        self, others: int, step_bytes: int, counters: dict[str, int], check: Callable[[], None]
    ) -> None:
        self.counters, self._check = counters, check
        self._slot_bytes = HEADER_BYTES + 2 * step_bytes  # each array may need 7 bytes more to be aligned
        self._fd = os.memfd_create("ring", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, SLOTS * self._slot_bytes)
        self._memory = mmap(self._fd, SLOTS * self._slot_bytes)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        self._filled = [os.eventfd(0, flags) for _ in range(others)]
        self._free = [os.eventfd(SLOTS, flags) for _ in range(others)]
        self._next = 0
        self._write = _slot_writer()
        self.ends = [
            Ends(ring=self._fd, slot_bytes=self._slot_bytes, filled=filled, free=free)
            for filled, free in zip(self._filled, self._free, strict=True)
        ]

    def send(self, number: int, batch: Batch) -> None:
        began = perf_counter_ns()
        nbytes = self._fill(Told(number, batch))
        _count(self.counters, began, nbytes)

    def order(self, what: str) -> None:
        self._fill(Told(-1, None, what))

    def _fill(self, told: Told) -> int:
        self.wait_until_free()
        at = self._next * self._slot_bytes
        self._next = (self._next + 1) % SLOTS
        nbytes = self._write(memoryview(self._memory)[at : at + self._slot_bytes], told)
        for filled in self._filled:
            os.eventfd_write(filled, 1)
        return nbytes

    def wait_until_free(self) -> None:
        """The guard: block until every rank is done with what was in the next slot."""
        began = perf_counter_ns()
        for free in self._free:
            while not select.select([free], [], [], 1.0)[0]:
                self._check()
            os.eventfd_read(free)
        self.counters["ring_full_ns"] += perf_counter_ns() - began

    def close(self) -> None:
        for fd in (self._fd, *self._filled, *self._free):
            os.close(fd)


class RingReader:
    """After, at the other end. What is received are views on the slot, until it is given back."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._memory = mmap(ends.ring, SLOTS * ends.slot_bytes)
        self._next = 0
        self._read = _slot_reader()

    def receive(self) -> Told:
        os.eventfd_read(self._ends.filled)
        at = self._next * self._ends.slot_bytes
        self._next = (self._next + 1) % SLOTS
        return self._read(memoryview(self._memory)[at : at + self._ends.slot_bytes])

    def done(self) -> None:
        os.eventfd_write(self._ends.free, 1)


def _slot_writer() -> Callable[[memoryview, Told], int]:
    import msgspec
    import numpy as np

    from overlap_bench.engines.overlap.layout import DTYPES

    encode = msgspec.msgpack.Encoder().encode

    def write(slot: memoryview, told: Told) -> int:
        """The bytes that it took. Raises EngineError where a step is larger than any should be."""
        batch = told.batch
        values: dict[str, Any] = {} if batch is None else batch.values
        changed: Sequence[tuple[int, Any]] = () if batch is None else batch.changed_rows
        arrays = [(name, np.asarray(each, dtype=DTYPES[name]).ravel()) for name, each in values.items()]
        program = None if batch is None else batch.program
        names = [(name, array.size) for name, array in arrays]
        rows = [(number, row.size) for number, row in changed]
        header = encode((told.number, told.order, program, names, rows))
        at = _aligned(_LENGTH.size + len(header))
        every = [*(array for _, array in arrays), *(row for _, row in changed)]
        if at + sum(_aligned(each.nbytes) for each in every) > len(slot):
            raise EngineError(f"step {told.number} does not fit into the ring's slots of {len(slot)} bytes")
        _LENGTH.pack_into(slot, 0, len(header))
        slot[_LENGTH.size : _LENGTH.size + len(header)] = header
        for array in every:
            np.frombuffer(slot, array.dtype, array.size, at)[:] = array
            at = _aligned(at + array.nbytes)
        return at

    return write


def _slot_reader() -> Callable[[memoryview], Told]:
    import msgspec
    import numpy as np

    from overlap_bench.engines.overlap.batch import Batch
    from overlap_bench.engines.overlap.layout import DTYPES
    from overlap_bench.engines.overlap.programs import Program

    header = tuple[int, str, Program | None, list[tuple[str, int]], list[tuple[int, int]]]
    decode = msgspec.msgpack.Decoder(header).decode

    def read(slot: memoryview) -> Told:
        (length,) = _LENGTH.unpack_from(slot)
        number, order, program, names, rows = decode(slot[_LENGTH.size : _LENGTH.size + length])
        if program is None:
            return Told(number, None, order)
        at = _aligned(_LENGTH.size + length)

        def view(dtype: str, count: int) -> np.ndarray:
            nonlocal at
            found: np.ndarray = np.frombuffer(slot, dtype, count, at)
            at = _aligned(at + found.nbytes)
            return found

        values: dict[str, Any] = {name: view(DTYPES[name], count) for name, count in names}
        changed = [(row, view("int32", count)) for row, count in rows]
        return Told(number, Batch(program, (), values, changed))

    return read


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _count(counters: dict[str, int], began: int, nbytes: int) -> None:
    counters["shared_steps"] += 1
    counters["shared_bytes"] += nbytes
    counters["share_ns"] += perf_counter_ns() - began


CHOICES: dict[str, Callable[..., Pickled | Ring]] = {"pickle": Pickled, "ring": Ring}
Receiver = Unpickled | RingReader
RECEIVERS: dict[str, Callable[[Ends], Receiver]] = {"pickle": Unpickled, "ring": RingReader}
