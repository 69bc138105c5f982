"""A CUDA card through torch.cuda.

Threads: torch's current device and current stream are thread-local, and copies and replays go to the current
stream. `torch.cuda.stream(...)` around each call would cost several µs, so a thread stays on the stream it
used last and is switched only when a call names another one. With d2h=blocking all is on `forward`, and no
thread switches after its first call; otherwise the one that launches goes to `copy` and back in each
step. Other code that uses torch.cuda in the same thread gets the stream that was used last.

Device time: a captured program has its timing events inside of the graph. A start event outside of it, on an
idle stream, would happen before the kernels arrive and count launch latency as device time; so the times of
uncaptured launches, whose events can only be outside, are upper bounds. Copies are not timed: two events
around each would cost more than the copy. Use Nsight Systems for those.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, cast

import numpy as np
import torch

from overlap_bench.engines.api import EngineError, pick
from overlap_bench.engines.devices.base import DeviceLost, Module, ModuleSpec
from overlap_bench.engines.devices.loading import build, one_line

_WARM_UPS = 2  # runs before a capture: lazy initialisation of libraries must not be captured
_EAGER_PAIRS = 256  # timing event pairs for uncaptured launches in flight
_WORK_ROWS = 1 << 18  # a server's round never ends: unbounded, they would grow by gigabytes a day
_ANCHOR_TRIES = 5
_ANCHOR_AGE_NS = 1_000_000_000  # elapsed_time is a float32 in ms: at 1 to 2 s its resolution is 122 ns
_LONGEST_DELAY_CYCLES = 5_000_000  # about 3 ms

PROGRAM = 0  # kind of device work


class CudaStream:
    """A torch stream with its name."""

    __slots__ = ("name", "raw")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.raw = torch.cuda.Stream(device)


class CudaBuffer:
    """Bytes [offset, offset + nbytes) of a module buffer, and the typed views on them that were used.

    A view is made at the first copy of that many elements of that type; later copies find it, 0.1 µs.
    """

    __slots__ = ("_views", "nbytes", "raw")

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw  # uint8, 1-D
        self.nbytes: int = raw.nbytes
        self._views: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A 1-D device view on the start of the range, of the tensor's type and number of elements."""
        key = (tensor.dtype, tensor.numel())
        view = self._views.get(key)
        if view is None:
            if tensor.nbytes > self.nbytes:
                raise ValueError(f"a copy of {tensor.nbytes} bytes, and the buffer's range has {self.nbytes}")
            if self.raw.storage_offset() % tensor.dtype.itemsize:
                raise ValueError(f"offset {self.raw.storage_offset()} is not aligned to {tensor.dtype}")
            view = self._views[key] = self.raw[: tensor.nbytes].view(tensor.dtype)
        return view


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A timing event and the host's time when it happened."""

    event: torch.cuda.Event
    ns: int


@dataclass(slots=True)
class _Pair:
    """Two timing events around a program, and the launch they are used by at present; step -1: none."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    anchor: _Anchor  # one that happened before that launch, and not long before
    step: int = -1


@dataclass(slots=True)
class _Replay:
    """One capture of a program; `done` is recorded after each replay.

    The pair's `end` can't be queried for that: the graph records it on the device, and until it does, it
    still reports the previous replay as done.
    """

    graph: torch.cuda.CUDAGraph
    pair: _Pair
    done: torch.cuda.Event


@dataclass(slots=True)
class _Captured:
    """A program captured twice, launched in turns: when one is due again, it is the other that is in flight,
    so the times of the launch before last can be read without waiting."""

    replays: tuple[_Replay, _Replay]
    next: int = 0


class _Thread(threading.local):
    """The stream that torch holds for this thread: of whichever device put it there last."""

    stream: CudaStream | None = None


_thread = _Thread()


class CudaDevice:
    """Honours engines.devices.base.Device.

    `blocking_sync`: a thread sleeps in `synchronize`; the default is to spin, GIL released, as the engines
    this one is compared with do. `chaos`: seed of random delays, spin kernels before commands. `index`: of
    the card.
    """

    kind = "cuda"
    pid: int | None = None

    def __init__(self, *, chaos: int | None = None, blocking_sync: bool = False, index: int = 0) -> None:
        if index:
            torch.cuda.set_device(index)
        self._device = torch.device("cuda", torch.cuda.current_device())
        torch.set_float32_matmul_precision("highest")  # no TF32: tokens are compared with a reference
        torch.backends.cudnn.allow_tf32 = False
        # cuDNN's attention builds a plan for each shape and thread on first use, tens of ms of host time:
        # every new prefill shape would pay it in the middle of a round, and a forward thread once more.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._blocking = blocking_sync
        self._chaos = None if chaos is None else random.Random(chaos)
        self._streams: dict[str, CudaStream] = {}
        self._module: Module | None = None
        self._captured: dict[tuple[str, tuple[int, ...]], _Captured] = {}
        self._pool: Any = None
        self._capture_stream = torch.cuda.Stream(self._device)
        # Addresses of pinned storages. Between captures torch's caching allocator keeps what it once pinned,
        # so no pageable tensor can get such an address. Tensor.is_pinned() would ask the driver.
        self._pinned: set[int] = set()
        self._held: list[torch.Tensor] = []
        self._anchor = self._tightest_anchor()
        self._anchored_ns = perf_counter_ns()
        self._round_anchor = self._anchor
        self._next_anchor: torch.cuda.Event | None = None
        self._spare = [self._timing_pair(external=False) for _ in range(_EAGER_PAIRS)]
        self._eager: deque[_Pair] = deque()
        self._rows: deque[tuple[int, int, int, int]] = deque(maxlen=_WORK_ROWS)
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

        properties = torch.cuda.get_device_properties(self._device)
        self.name: str = properties.name
        self.details = {
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory} bytes",
            "sync": "blocking" if blocking_sync else "spin",
            "chaos": "off" if chaos is None else str(chaos),
            "attention": "without cuDNN",
        }

    # -- boot ----------------------------------------------------------------------------------------------

    def load(self, spec: ModuleSpec) -> dict[str, Any]:
        """Build the module on the card. Raises EngineError or BadSetting."""
        torch.cuda.synchronize(self._device)
        self._read_all()
        self._captured.clear()
        self._module = None
        gc.collect()  # modules are in reference cycles, and old and new might not fit together
        torch.cuda.empty_cache()
        try:
            module = build(spec, self._device)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(one_line(error)) from error
        self._module = module
        self._pool = torch.cuda.graph_pool_handle()
        # Built on the default stream, used on others.
        torch.cuda.synchronize(self._device)
        return module.facts

    def capture(self, program: str, *arguments: int) -> None:
        """Warm up on a side stream, capture twice, replay both. One thread captures, and nothing else runs.

        One pool for all: replays run on one stream, one after another, so they may share their temporaries;
        what has to last from one to the next is in the module's buffers, outside of the pool. Capture the
        largest batch first, then the others fit into its memory. The error mode is thread-local, so that
        another thread's harmless CUDA call does not spoil a capture. Inference mode is for the program alone:
        the RNG state that torch keeps with a graph is written at each replay, outside of that mode.
        """
        self.drain()
        # A capture empties the cache of pinned blocks: what is freed there may come back as pageable memory.
        self._pinned = {each.untyped_storage().data_ptr() for each in self._held}
        run = self._program(program)
        side = self._capture_stream
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run(*arguments)
        side.synchronize()
        first, second = (self._capture_once(run, arguments) for _ in range(2))
        with torch.cuda.stream(side):
            for replay in (first, second):  # the first launch of a graph uploads it: not in a measured round
                replay.graph.replay()
        torch.cuda.synchronize(self._device)
        self._captured[program, arguments] = _Captured((first, second))

    def _capture_once(self, run: Callable[..., None], arguments: tuple[int, ...]) -> _Replay:
        graph = torch.cuda.CUDAGraph()
        pair = self._timing_pair(external=True)
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
        ):
            pair.start.record()
            with torch.inference_mode():
                run(*arguments)
            pair.end.record()
        return _Replay(graph, pair, torch.cuda.Event())

    def buffer(self, name: str, offset: int = 0, nbytes: int | None = None) -> CudaBuffer:
        buffers = self._module.buffers if self._module is not None else {}
        raw = cast(torch.Tensor, pick(name, buffers, "buffer")).view(-1).view(torch.uint8)
        size = raw.nbytes
        if nbytes is None:
            nbytes = size - offset
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of buffer '{name}', which has {size}")
        return CudaBuffer(raw[offset : offset + nbytes])

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed."""
        tensor = torch.zeros(count, dtype=dtype, pin_memory=True)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        self._held.append(tensor)
        return tensor

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._streams[name] = CudaStream(name, self._device)
        return self._streams[name]

    def adopt_thread(self) -> None:
        torch.cuda.set_device(self._device)
        self._use(self.stream("forward"))

    # -- hot -----------------------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """By torch's caching host allocator: a block never pinned before costs a cudaHostAlloc, which may
        wait for the device. Copies from it are tracked by the allocator's own events."""
        pinned = tensor.pin_memory()
        self._pinned.add(pinned.untyped_storage().data_ptr())
        return pinned

    def to_device(self, target: CudaBuffer, source: torch.Tensor, stream: CudaStream) -> None:
        """The same call for all memory: what the driver does with a pageable source is to be measured."""
        view = target.like(source)
        self._use(stream)
        view.copy_(_flat(source), non_blocking=True)
        kind = "pinned" if source.untyped_storage().data_ptr() in self._pinned else "pageable"
        self.counters[f"h2d_{kind}_copies"] += 1
        self.counters[f"h2d_{kind}_bytes"] += source.nbytes

    def to_host(self, target: torch.Tensor, source: CudaBuffer, stream: CudaStream) -> None:
        view = source.like(target)
        self._use(stream)
        pinned = target.untyped_storage().data_ptr() in self._pinned
        if self._blocking and not pinned:
            self.synchronize(self.record(stream))  # the copy would wait inside of the driver, spinning
        _flat(target).copy_(view, non_blocking=pinned)
        kind = "pinned" if pinned else "pageable"
        self.counters[f"d2h_{kind}_copies"] += 1
        self.counters[f"d2h_{kind}_bytes"] += target.nbytes

    def launch(self, program: str, *arguments: int, stream: CudaStream, step: int) -> None:
        self._use(stream)
        captured = self._captured.get((program, arguments))
        if captured is None:
            self._launch_eagerly(self._program(program), arguments, stream, step)
        else:
            self._replay(captured, stream, step)
        if perf_counter_ns() - self._anchored_ns > _ANCHOR_AGE_NS:
            self._move_anchor(stream)

    def _replay(self, captured: _Captured, stream: CudaStream, step: int) -> None:
        replay = captured.replays[captured.next]
        captured.next ^= 1
        self._harvest(replay.pair, replay.done)
        replay.graph.replay()
        replay.done.record(stream.raw)
        replay.pair.step, replay.pair.anchor = step, self._anchor
        self.counters["captured_launches"] += 1

    def _launch_eagerly(
        self, run: Callable[..., None], arguments: tuple[int, ...], stream: CudaStream, step: int
    ) -> None:
        # No lock: one thread launches, and a round is read when nothing is in flight.
        while self._eager and self._eager[0].end.query():
            pair = self._eager.popleft()
            self._harvest(pair, pair.end)
            self._spare.append(pair)
        mine = self._spare.pop() if self._spare else None
        if mine is not None:
            mine.start.record(stream.raw)
        with torch.inference_mode():
            run(*arguments)
        if mine is not None:
            mine.end.record(stream.raw)
            mine.step, mine.anchor = step, self._anchor
            self._eager.append(mine)
        else:
            self.counters["work_rows_lost"] += 1
        self.counters["eager_launches"] += 1

    def record(self, stream: CudaStream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=self._blocking)
        event.record(stream.raw)
        return event

    def wait(self, stream: CudaStream, event: torch.cuda.Event) -> None:
        stream.raw.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()
        except torch.AcceleratorError as error:
            raise DeviceLost(one_line(error)) from error

    def _use(self, stream: CudaStream) -> None:
        """Make `stream` this thread's current one, and let chaos have its turn on it."""
        if _thread.stream is not stream:
            torch.cuda.set_stream(stream.raw)
            _thread.stream = stream
        if self._chaos is not None:
            cycles = self._chaos.choice((0, 0, self._chaos.randrange(_LONGEST_DELAY_CYCLES)))
            if cycles:
                torch.cuda._sleep(cycles)

    # -- between rounds ------------------------------------------------------------------------------------

    def drain(self) -> None:
        try:
            for stream in self._streams.values():
                stream.raw.synchronize()
        except torch.AcceleratorError as error:
            raise DeviceLost(one_line(error)) from error

    def begin_round(self) -> None:
        """The streams are idle: the anchor waits for the device."""
        self._read_all()
        self._rows.clear()
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._anchor = self._round_anchor = self._tightest_anchor()
        self._next_anchor = None
        self._anchored_ns = perf_counter_ns()

    def work(self) -> np.ndarray:
        """Programs only, see above; the last 2^18. Launches before those, and those whose events could not be
        read in time, are counted in `work_rows_lost`."""
        self.drain()
        self._read_all()
        rows = np.array(sorted(self._rows, key=lambda row: row[2]), dtype=np.int64).reshape(-1, 4)
        return self._by_host_clock(rows)

    def _by_host_clock(self, rows: np.ndarray) -> np.ndarray:
        """Rows stretched so that device and host time agree at the end of the round. Anchors hop by device
        time alone, and the two clocks drift apart by tens of us in a second."""
        began, closing = self._round_anchor.ns, self._tightest_anchor()
        by_device = self._anchor.ns + round(self._anchor.event.elapsed_time(closing.event) * 1e6)
        if by_device > began:
            stretch = (closing.ns - began) / (by_device - began)
            rows[:, 2:] = began + np.rint((rows[:, 2:] - began) * stretch).astype(np.int64)
        return rows

    def memory(self) -> dict[str, int]:
        """Pinned: what torch's host allocator holds, in its powers of two, blocks in its cache included."""
        return {
            "device_peak": torch.cuda.max_memory_allocated(self._device),
            "pinned_peak": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
        }

    def close(self) -> None:
        """Asks nothing of the card, which may be lost."""
        self._captured.clear()
        self._module = None
        self._pool = None
        self._held.clear()

    def _program(self, program: str) -> Callable[..., None]:
        programs = self._module.programs if self._module is not None else {}
        return cast(Callable[..., None], pick(program, programs, "program"))

    # -- device time ---------------------------------------------------------------------------------------

    def _timing_pair(self, external: bool) -> _Pair:
        """`external`: the graph records it at each replay; otherwise capture only orders nodes by it."""
        return _Pair(
            torch.cuda.Event(enable_timing=True, external=external),
            torch.cuda.Event(enable_timing=True, external=external),
            self._anchor,
        )

    def _harvest(self, pair: _Pair, done: torch.cuda.Event) -> None:
        """Turn the pair's last launch into a row. Where it has not ended yet, count it and never wait."""
        if pair.step < 0:
            return
        if done.query():
            start = pair.anchor.ns + round(pair.anchor.event.elapsed_time(pair.start) * 1e6)
            length = round(pair.start.elapsed_time(pair.end) * 1e6)
            self.counters["work_rows_lost"] += len(self._rows) == _WORK_ROWS  # the oldest makes room
            self._rows.append((PROGRAM, pair.step, start, start + length))
        else:
            self.counters["work_rows_lost"] += 1
        pair.step = -1

    def _read_all(self) -> None:
        """Every pair still in use; the streams are idle."""
        for captured in self._captured.values():
            for replay in captured.replays:
                self._harvest(replay.pair, replay.done)
        while self._eager:
            pair = self._eager.popleft()
            self._harvest(pair, pair.end)
            self._spare.append(pair)

    def _tightest_anchor(self) -> _Anchor:
        """From the try with the smallest uncertainty; waits for the device."""
        best, narrowest = None, 0
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_ANCHOR_TRIES)]
        for event in events:
            event.record(self._capture_stream)  # the first record creates it, which would count as waiting
        torch.cuda.synchronize(self._device)
        for event in events:
            before = perf_counter_ns()
            event.record(self._capture_stream)
            event.synchronize()
            after = perf_counter_ns()
            if best is None or after - before < narrowest:
                narrowest = after - before
                best = _Anchor(event, (before + after) // 2)
        assert best is not None
        return best

    def _move_anchor(self, stream: CudaStream) -> None:
        """Hop, by device time, to the event recorded a second ago, and record the next. Nothing waits."""
        event = self._next_anchor
        if event is not None:
            if not event.query():
                return
            elapsed = round(self._anchor.event.elapsed_time(event) * 1e6)
            self._anchor = _Anchor(event, self._anchor.ns + elapsed)
        self._next_anchor = torch.cuda.Event(enable_timing=True)
        self._next_anchor.record(stream.raw)
        self._anchored_ns = perf_counter_ns()


_COUNTERS = (
    "h2d_pageable_copies",
    "h2d_pageable_bytes",
    "h2d_pinned_copies",
    "h2d_pinned_bytes",
    "d2h_pageable_copies",
    "d2h_pageable_bytes",
    "d2h_pinned_copies",
    "d2h_pinned_bytes",
    "captured_launches",
    "eager_launches",
    "work_rows_lost",
)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError("a copy needs a contiguous host tensor")
    return tensor if tensor.dim() == 1 else tensor.view(-1)
