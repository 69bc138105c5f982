"""The emulated device, host side. What it shares with CUDA and where it differs: README.md beside this file.

Costs on the host (2-core machine, µs): copy of 512 pinned bytes 2, of pageable ones 6.5, captured launch 2,
record 0.3, `synchronize` of an event that has happened 0.2, `pin` 8. Uncaptured: 0.5 per leaf module more.
"""

from __future__ import annotations

import fcntl
import os
import platform
import select
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from overlap_bench.engines.api import pick
from overlap_bench.engines.devices.base import ModuleSpec
from overlap_bench.engines.devices.emulated.child import Child
from overlap_bench.engines.devices.emulated.commands import (
    CAPTURED,
    COUNTED,
    LAUNCH,
    LEAVES,
    MAX_ARGUMENTS,
    MAX_STREAMS,
    MAX_WAITERS,
    PACED,
    PAGE_BYTES,
    PIPE_BYTES,
    QUEUE_RECORDS,
    RECORD,
    TO_DEVICE,
    TO_HOST,
    WAIT,
    WORK_BYTES,
    WORK_HEAD,
    WORK_ROWS,
    Load,
)
from overlap_bench.engines.devices.emulated.memory import (
    SLOT_BYTES,
    SLOTS,
    Arena,
    BounceRing,
    CachingAllocator,
)
from overlap_bench.engines.devices.emulated.streams import EmulatedEvent, EmulatedStream, Waiting
from overlap_bench.engines.machine import cpu_model, known, move_threads
from overlap_bench.engines.pace import Pace

_PINNED_BYTES = 1 << 30  # sparse: only what is touched exists
_PADDING = tuple((0,) * (4 - count) for count in range(MAX_ARGUMENTS + 1))  # of the words of a record


@dataclass(slots=True)
class EmulatedBuffer:
    """Bytes [offset, offset + nbytes) of a module buffer in the device process."""

    buffer: int
    offset: int
    nbytes: int


class EmulatedDevice:
    """A second process that is the accelerator; honours engines.devices.base.Device.

    `staging`: what a pageable copy to the device does first: "copy" stages at once, "sync" lets the stream
    run empty before it stages; CUDA's documentation allows both. `chaos`: seed of delays before commands.
    `cores`: "split" gives the device process the last core this thread may run on, and keeps all threads of
    this process, and what they start, off that core until `close`; "shared", or a single core: no pinning.
    `pace`: how long a program takes, None as long as it computes. `place`: which of how many devices this is
    that work together; each has a core of its own, as far as the host is left with one.
    """

    def __init__(
        self,
        *,
        staging: str = "copy",
        pace: Pace | None = None,
        chaos: int | None = None,
        cores: str = "split",
        place: tuple[int, int] = (0, 1),
    ) -> None:
        pick(staging, {"copy": 0, "sync": 0}, "staging")
        self._sync_first = staging == "sync"
        self._all_cores = os.sched_getaffinity(0)
        devices = _device_cores(self._all_cores, place[1]) if cores == "split" else []
        core = devices[place[0] % len(devices)] if devices else None
        self._host_cores = self._all_cores - set(devices)

        page_fd, work_fd = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("control", "work"))
        os.ftruncate(page_fd, PAGE_BYTES)
        os.ftruncate(work_fd, WORK_BYTES)
        page = mmap(page_fd, PAGE_BYTES)
        self._cells = memoryview(page).cast("q")
        self._work = np.frombuffer(mmap(work_fd, WORK_BYTES), np.int64).reshape(WORK_ROWS, 4)
        self._arena = Arena(_PINNED_BYTES)
        wakeups = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(MAX_WAITERS)]
        pipes = [os.pipe() for _ in range(MAX_STREAMS)]
        for _, writing in pipes:
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        readings = [reading for reading, _ in pipes]
        shared = {"page": page_fd, "work": work_fd, "arena": self._arena.fd}
        boot = shared | {
            "arena_bytes": self._arena.nbytes,
            "pipes": readings,
            "wakeups": wakeups,
            "core": core,
            "chaos": chaos,
            "pace": pace,
        }
        self._child = Child(boot, page, [*shared.values(), *readings, *wakeups])
        for fd in (*shared.values(), *readings):
            os.close(fd)  # a reading end left open here would hide the device process's death from writers

        self.pid: int | None = self._child.pid
        self._closed = False
        self._waiting = Waiting(page, self._child.pidfd, wakeups, self._child.lost)
        self._unnamed = [
            EmulatedStream("", index, writing, self._child.lost) for index, (_, writing) in enumerate(pipes)
        ]
        self._streams: dict[str, EmulatedStream] = {}
        self._ring = BounceRing(self._arena, self._waiting.until)
        self._cache = CachingAllocator(self._arena, self._waiting.happened)
        self._buffers: dict[str, tuple[int, int]] = {}
        self._programs: dict[str, int] = {}
        self._captured: set[tuple[str, tuple[int, ...]]] = set()
        self._first_row = 0
        self._counts = _COUNTERS + (_PACED if pace else ())
        self.counters: dict[str, int] = {}
        self._forget()

        model = cpu_model()
        self.kind = f"emulated, paced: {pace.name}" if pace else "emulated"
        self.name = f"emulated on {model}"
        self.details = {
            "cpu": model,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "staging": staging,
            "bounce_ring": f"{SLOTS} x {SLOT_BYTES} bytes",
            "launch_queue": f"{QUEUE_RECORDS} commands",
            "device_core": "shared" if core is None else str(core),
            "host_cores": ",".join(map(str, sorted(self._host_cores))),
            "chaos": "off" if chaos is None else str(chaos),
            **({"pace": pace.text} if pace else {}),
        }
        try:
            self._resident_at_boot = self._child.booted()
        except BaseException:
            self.close()
            raise
        if core is not None:
            move_threads(self._host_cores)

    # -- boot ----------------------------------------------------------------------------------------------

    def load(self, spec: ModuleSpec) -> dict[str, Any]:
        """Build the module in the device process. Raises BadSetting or EngineError as build did."""
        self.drain()
        self._captured.clear()
        self._buffers, self._programs = {}, {}
        answer = self._child.request(Load(spec.build, spec.arguments))
        self._buffers, self._programs = answer.buffers, answer.programs
        return answer.facts

    def capture(self, program: str, *arguments: int) -> None:
        """From now on one command; nothing runs, and nothing is made ready."""
        self._program(program, arguments)
        self._captured.add((program, arguments))

    def buffer(self, name: str, offset: int = 0, nbytes: int | None = None) -> EmulatedBuffer:
        identity, size = pick(name, self._buffers, "buffer")
        if nbytes is None:
            nbytes = size - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of buffer '{name}', which has {size}")
        return EmulatedBuffer(identity, offset, nbytes)

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed. Raises EngineError where the pinned memory is used up."""
        nbytes = count * dtype.itemsize
        return torch.frombuffer(self._arena.view(self._arena.take(nbytes), nbytes), dtype=dtype)

    def stream(self, name: str) -> EmulatedStream:
        if name not in self._streams:
            stream = self._unnamed[len(self._streams)]
            stream.name = name
            self._streams[name] = stream
        return self._streams[name]

    def adopt_thread(self) -> None:
        """Nothing is thread-local here."""

    # -- hot -----------------------------------------------------------------------------------------------
    # Counters are added to without a lock: `d[k] += n` on a dict of ints gives up the GIL nowhere in between.

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._cache.pinned_copy(tensor)

    def to_device(self, target: EmulatedBuffer, source: torch.Tensor, stream: EmulatedStream) -> None:
        nbytes: int = source.nbytes
        _check_copy(source, target, nbytes)
        counters = self.counters
        address = source.data_ptr()
        arena = self._arena
        if arena.start <= address < arena.end:
            value = stream.submit(
                RECORD.pack(TO_DEVICE, address - arena.start, target.buffer, target.offset, nbytes, 0, 0, 0)
            )
            self._cache.used_by(source, stream.index, value)
            counters["h2d_pinned_copies"] += 1
            counters["h2d_pinned_bytes"] += nbytes
            return
        if self._sync_first:
            start = perf_counter_ns()
            self._waiting.until(EmulatedEvent(stream.index, stream.submitted))
            counters["staging_wait_ns"] += perf_counter_ns() - start
        waited = self._ring.to_device(address, nbytes, target.buffer, target.offset, stream)
        counters["staging_wait_ns"] += waited
        counters["h2d_pageable_copies"] += 1
        counters["h2d_pageable_bytes"] += nbytes

    def to_host(self, target: torch.Tensor, source: EmulatedBuffer, stream: EmulatedStream) -> None:
        nbytes: int = target.nbytes
        _check_copy(target, source, nbytes)
        counters = self.counters
        address = target.data_ptr()
        arena = self._arena
        if arena.start <= address < arena.end:
            value = stream.submit(
                RECORD.pack(TO_HOST, address - arena.start, source.buffer, source.offset, nbytes, 0, 0, 0)
            )
            self._cache.used_by(target, stream.index, value)
            counters["d2h_pinned_copies"] += 1
            counters["d2h_pinned_bytes"] += nbytes
            return
        block = self._cache.take(min(nbytes, SLOT_BYTES))
        for done in range(0, nbytes, SLOT_BYTES):
            size = min(SLOT_BYTES, nbytes - done)
            value = stream.submit(
                RECORD.pack(TO_HOST, block.offset, source.buffer, source.offset + done, size, 0, 0, 0)
            )
            self._waiting.until(EmulatedEvent(stream.index, value))
            arena.read(block.offset, address + done, size)
        self._cache.give(block)
        counters["d2h_pageable_copies"] += 1
        counters["d2h_pageable_bytes"] += nbytes

    def launch(self, program: str, *arguments: int, stream: EmulatedStream, step: int) -> None:
        """The first launch of a program that was never captured also counts its leaf modules, and blocks
        until it has run, as CUDA's first launch of a kernel does while it is loaded."""
        identity = self._program(program, arguments)
        code, words = LAUNCH | len(arguments) << 8, arguments + _PADDING[len(arguments)]
        if len(words) > 4:
            code, words = code | words[4] << 16, words[:4]
        if (program, arguments) in self._captured:
            stream.submit(RECORD.pack(code, identity, step, CAPTURED, *words))
            self.counters["captured_launches"] += 1
            return
        leaves = self._cells[LEAVES + identity]
        if leaves < 0:
            value = stream.submit(RECORD.pack(code, identity, step, COUNTED, *words))
            self._waiting.until(EmulatedEvent(stream.index, value))
        else:
            stream.submit(RECORD.pack(code, identity, step, leaves, *words), kernels=leaves)
            self.counters["kernel_commands"] += leaves
        self.counters["eager_launches"] += 1

    def record(self, stream: EmulatedStream) -> EmulatedEvent:
        """No command: an event is a place in the count."""
        return EmulatedEvent(stream.index, stream.submitted)

    def wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        stream.submit(RECORD.pack(WAIT, event.stream, event.value, 0, 0, 0, 0, 0))

    def synchronize(self, event: EmulatedEvent) -> None:
        self._waiting.until(event)

    # -- between rounds ------------------------------------------------------------------------------------

    def drain(self) -> None:
        for stream in list(self._streams.values()):
            self._waiting.until(self.record(stream))

    def begin_round(self) -> None:
        self._forget()

    def work(self) -> np.ndarray:
        """Complete once drained. Rows that the ring no longer held are missing, the oldest first, and
        counted in `work_rows_lost`."""
        head = self._cells[WORK_HEAD]
        first = max(self._first_row, head - WORK_ROWS)
        self.counters["work_rows_lost"] = first - self._first_row
        self.counters["lost_wakeups"] = self._waiting.lost_wakeups - self._lost_wakeups_before
        for index, name in enumerate(_PACED if "paced_programs" in self._counts else ()):
            self.counters[name] = self._cells[PACED + index] - self._paced_before[index]
        rows: np.ndarray = self._work[np.arange(first, head) % WORK_ROWS]
        return rows

    def memory(self) -> dict[str, int]:
        """Device: what the device process grew by at most since it booted. Pinned: staging ring included."""
        resident = self._resident_at_boot
        if not self._closed:
            if select.select([self._child.pidfd], [], [], 0)[0]:
                raise self._child.lost()
            resident = known(_most_resident_bytes, resident, self.pid)
        return {
            "device_peak": max(0, resident - self._resident_at_boot),
            "pinned_peak": self._arena.used,
        }

    def close(self) -> None:
        """Commands still queued are dropped. What is called later raises DeviceLost."""
        if self._closed:
            return
        self._closed = True
        self._child.close()
        for stream in self._unnamed:
            stream.close()
        self._waiting.close()
        move_threads(self._all_cores)

    def _program(self, program: str, arguments: tuple[int, ...]) -> int:
        try:
            return self._programs[program]
        except KeyError:
            identity: int = pick(program, self._programs, "program")
            return identity

    def _forget(self) -> None:
        self._first_row = self._cells[WORK_HEAD]
        self._lost_wakeups_before = self._waiting.lost_wakeups
        self._paced_before = list(self._cells[PACED : PACED + len(_PACED)])
        self.counters = dict.fromkeys(self._counts, 0)


_COUNTERS = (
    "h2d_pageable_copies",
    "h2d_pageable_bytes",
    "h2d_pinned_copies",
    "h2d_pinned_bytes",
    "d2h_pageable_copies",
    "d2h_pageable_bytes",
    "d2h_pinned_copies",
    "d2h_pinned_bytes",
    "staging_wait_ns",  # how long pageable copies to the device waited for the ring, or for the stream
    "captured_launches",
    "eager_launches",
    "kernel_commands",
    "lost_wakeups",  # 0, or the fence is not one on this machine
    "work_rows_lost",
)
_PACED = ("paced_programs", "paced_overruns", "paced_late_ns")  # in the order of the control page's cells


def _most_resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    (most,) = (each for each in lines if each.startswith(b"VmHWM:"))
    return int(most.split()[1]) << 10


def _device_cores(cores: set[int], devices: int) -> list[int]:
    """The last ones, so that the host is left with one: a core for each device, or fewer that they share."""
    return sorted(cores, reverse=True)[: min(devices, len(cores) - 1)]


def _check_copy(tensor: torch.Tensor, buffer: EmulatedBuffer, nbytes: int) -> None:
    if nbytes > buffer.nbytes:
        raise ValueError(f"a copy of {nbytes} bytes, and the buffer's range has {buffer.nbytes}")
    if not tensor.is_contiguous():
        raise ValueError("a copy needs a contiguous host tensor")
    if buffer.offset % tensor.dtype.itemsize:  # CUDA views the bytes as this dtype
        raise ValueError(f"offset {buffer.offset} is not aligned to {tensor.dtype}")
