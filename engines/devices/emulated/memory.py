"""Host memory the device can read, and how the rest gets there."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from time import perf_counter_ns

import torch

from overlap_bench.engines.api import EngineError
from overlap_bench.engines.devices.emulated.commands import RECORD, TO_DEVICE
from overlap_bench.engines.devices.emulated.streams import EmulatedEvent, EmulatedStream

SLOTS = 8
SLOT_BYTES = 64 << 10
_ALIGNMENT = 256  # bytes; also the smallest size class of the caching allocator

# Through CFUNCTYPE, unlike ctypes.memmove, a call releases the GIL, as torch's copy_ does.
_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0
)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the caller keeps the tensor alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Arena:
    """Pinned host memory: one sparse memfd, mapped by both processes. Pages exist once they are touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("pinned", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        # Never unmapped by hand: tensors over it may outlive the device, and hold the mapping.
        self._view = memoryview(mmap(self.fd, nbytes))
        self.start: int = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        self.end = self.start + nbytes
        self.used = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` more, zeroed, aligned to 256; never given back."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if self.used + size > self.nbytes:
                raise EngineError(f"out of pinned memory: the emulated device has {self.nbytes >> 20} MiB")
            offset = self.used
            self.used += size
        return offset

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A view of its own on a part of the arena."""
        return self._view[offset : offset + nbytes]

    def write(self, offset: int, address: int, nbytes: int) -> None:
        """memcpy from host memory into the arena, GIL released."""
        _memmove(self.start + offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        """memcpy from the arena to host memory, GIL released."""
        _memmove(address, self.start + offset, nbytes)


class BounceRing:
    """What a pageable copy to the device goes through: SLOTS slots, reused once the device has read them."""

    def __init__(self, arena: Arena, synchronize: Callable[[EmulatedEvent], None]) -> None:
        self._arena = arena
        self._synchronize = synchronize
        self._slots = [arena.take(SLOT_BYTES) for _ in range(SLOTS)]
        self._in_flight: list[EmulatedEvent | None] = [None] * SLOTS
        self._next = 0
        self._lock = threading.Lock()

    def to_device(self, address: int, nbytes: int, buffer: int, offset: int, stream: EmulatedStream) -> int:
        """Stage and queue a copy; on return the source may be rewritten. Returns the ns waited for slots.

        The oldest slot may wait for a program to end: then so does the caller, as with a driver's full
        staging buffer. Other threads that stage queue up behind it.
        """
        waited = 0
        with self._lock:
            for done in range(0, nbytes, SLOT_BYTES):
                slot = self._next
                self._next = (slot + 1) % SLOTS
                event = self._in_flight[slot]
                if event is not None:
                    start = perf_counter_ns()
                    self._synchronize(event)
                    waited += perf_counter_ns() - start
                size = min(SLOT_BYTES, nbytes - done)
                at = self._slots[slot]
                self._arena.write(at, address + done, size)
                value = stream.submit(RECORD.pack(TO_DEVICE, at, buffer, offset + done, size, 0, 0, 0))
                self._in_flight[slot] = EmulatedEvent(stream.index, value)
        return waited


@dataclass(slots=True)
class Block:
    """A piece of pinned memory that is handed out again and again."""

    offset: int
    nbytes: int
    # By stream: the count that its last copy here completes with.
    uses: dict[int, int] = field(default_factory=dict)
    watch: weakref.ref[memoryview] | None = None


class CachingAllocator:
    """Pinned blocks in power-of-two sizes, as CUDA's caching host allocator keeps them.

    A block is free again once its tensor was dropped and the copies that used it are done: a copy may still
    be in the queue when the last reference goes.
    """

    def __init__(self, arena: Arena, happened: Callable[[EmulatedEvent], bool]) -> None:
        self._arena = arena
        self._happened = happened
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._busy: deque[Block] = deque()
        self._live: dict[int, Block] = {}  # by address, those with a tensor
        # Filled by weak references' callbacks, which run wherever the last reference goes, perhaps inside
        # `take`: an append needs no lock.
        self._dropped: deque[Block] = deque()

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`."""
        size = max(_ALIGNMENT, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._collect()
            free = self._free.setdefault(size, [])
            return free.pop() if free else Block(self._arena.take(size), size)

    def give(self, block: Block) -> None:
        """Give back a block that no copy uses any more."""
        self._free[block.nbytes].append(block)

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in a block of its own."""
        source = tensor.contiguous()
        block = self.take(source.nbytes)
        self._arena.write(block.offset, source.data_ptr(), source.nbytes)
        # torch keeps this very view for as long as the storage lives, views of the tensor included.
        view = self._arena.view(block.offset, source.nbytes)
        block.watch = weakref.ref(view, lambda _: self._dropped.append(block))
        self._live[self._arena.start + block.offset] = block
        return torch.frombuffer(view, dtype=source.dtype).view(source.shape)

    def used_by(self, tensor: torch.Tensor, stream: int, value: int) -> None:
        """A copy that completes with `value` reads or writes this tensor."""
        if self._live:
            block = self._live.get(tensor.untyped_storage().data_ptr())
            if block is not None:
                block.uses[stream] = value

    def _collect(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            del self._live[self._arena.start + block.offset]
            self._busy.append(block)
        while self._busy and self._idle(self._busy[0]):  # in the order they were dropped, as CUDA does
            block = self._busy.popleft()
            block.uses.clear()
            self._free[block.nbytes].append(block)

    def _idle(self, block: Block) -> bool:
        return all(self._happened(EmulatedEvent(*use)) for use in block.uses.items())
