"""The card that an engine's own host code runs against: a clock, and what each step asks of it.

What a GPU's host path calls is there: Triton's driver, CUDA graphs, events, streams, pinned copies. A launch
is queued on the clock and counted; nothing computes. What a call costs a host beside its Python (the
driver's part) is the ledger's, and is spent with the GIL released, as CUDA's bindings release it.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from overlap_bench.engines.api import PHASES
from overlap_bench.engines.delay import Delay
from overlap_bench.engines.pace import Clock, Ledger, Pace, Size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlap_bench.engines.tracing import Ranges

KINDS = ("decode", "prefill", "mixed")
METADATA, LAUNCH, WAIT = (PHASES.index(phase) for phase in ("metadata", "launch", "wait.copy_done"))
LOOKS = 3  # steps of a kind whose operations are counted; what a step of that kind asks for hardly varies


@dataclass(slots=True)
class Counts:
    """What the steps of one kind asked of the device."""

    steps: int = 0
    launches: int = 0  # by Triton
    replays: int = 0
    events: int = 0  # waited for
    operations: int = 0  # of torch, in the steps that were looked at
    copies: int = 0  # to the device and back, likewise
    early_operations: int = 0  # of those, before the forward pass was launched
    early_copies: int = 0
    delayed_operations: int = 0  # of those, after it was launched
    delayed_copies: int = 0
    looked: int = 0  # steps in which operations and copies were counted

    def of_a_step(self) -> dict[str, float]:
        """Each mean per step."""
        steps, looked = max(1, self.steps), max(1, self.looked)
        return {
            "launches": self.launches / steps,
            "replays": self.replays / steps,
            "events": self.events / steps,
            "operations": self.operations / looked,
            "copies": self.copies / looked,
        }


@dataclass(slots=True)
class Program:
    """A step on its way: what the clock makes of it, and when the host got where with it; ns, -1 not yet."""

    prepare_ns: int  # the runner began to prepare its inputs
    step: int = -1
    sizes: list[Size] = field(default_factory=list)  # what it computes: a decode, a prefill, or both
    launch_ns: int = -1  # inputs are ready
    launched_ns: int = -1  # all of the step is queued, sampling and copies too
    begin_ns: int = -1  # on the device
    end_ns: int = -1
    wait_ns: int = -1  # the host begins to wait for its tokens
    woke_ns: int = -1


@dataclass
class Device:
    """`pace`: how long its programs take, and what its driver's calls cost the host. `held`: that is spent
    with the GIL held, to show what releasing it changes."""

    pace: Pace
    held: bool = False
    clock: Clock = field(default_factory=Clock)
    counts: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in KINDS})
    kind: str = "decode"  # of the step that is prepared
    program: Program = field(default_factory=lambda: Program(0))
    programs: deque[Program] = field(default_factory=lambda: deque(maxlen=64))  # whose tokens are not taken
    serving: bool = False  # what boots is not paced
    ranges: Ranges | None = None  # NVTX, where a tool listens
    _begun: tuple[int, int] = (0, 0)  # operations and copies of its kind before this step
    step: int = -1  # that is prepared, by the scheduler's count
    delay: Delay = field(default_factory=Delay)  # of the phases that are here, metadata and launch
    _in_range: bool = False

    @property
    def ledger(self) -> Ledger:
        return self.pace.ledger

    @property
    def now_counts(self) -> Counts:
        return self.counts[self.kind]

    def asked(self) -> Counter[str]:
        """What the steps of each kind have asked of the driver so far: decode_launches, prefill_replays, …"""
        return Counter(
            {
                f"{kind}_{name}": round(counts.steps * mean)
                for kind, counts in self.counts.items()
                for name, mean in counts.of_a_step().items()
            }
        )

    def begin(self, kind: str) -> None:
        """A step is about to be prepared."""
        self.kind = kind
        self.now_counts.steps += 1
        self.program = Program(perf_counter_ns(), step=self.step)
        self.programs.append(self.program)
        self._begun = self.now_counts.operations, self.now_counts.copies
        self._range(METADATA)

    def prepared(self) -> None:
        """Its inputs are ready, and the host launches it. What torch's operations and copies for them cost
        beside what their dispatch takes here is spent now: on a card they delay the launch."""
        if self.serving:
            counts, (operations, copies) = self.now_counts, self._begun
            counts.early_operations += counts.operations - operations
            counts.early_copies += counts.copies - copies
            self._charge(counts.early_operations, counts.early_copies)
            self.delay.spend("metadata")
        self.program.launch_ns = perf_counter_ns()
        if self.serving:
            self._range(LAUNCH)

    def launched(self) -> None:
        """All of it is queued, sampling and copies too; these are charged likewise."""
        counts = self.now_counts
        operations = counts.operations - counts.early_operations - counts.delayed_operations
        self._charge(operations, counts.copies - counts.early_copies - counts.delayed_copies)
        self.delay.spend("launch")
        self.program.launched_ns = perf_counter_ns()
        self._range(None)

    def _range(self, phase: int | None) -> None:
        """What a tool sees the host do from now on; None: nothing."""
        if self.ranges is None:
            return
        if self._in_range:
            self.ranges.pop()
        self._in_range = phase is not None
        if phase is not None:
            self.ranges.push(phase, self.step)

    # -- what the engine's host code calls ---------------------------------------------------------------

    def spend(self, ns: int) -> None:
        if ns <= 0 or not self.serving:
            return
        if self.held:
            end = perf_counter_ns() + ns
            while perf_counter_ns() < end:
                pass
        else:
            self.clock.spend(ns)

    def launch(self) -> None:
        """A Triton kernel, beside the forward pass: its time is in the pace."""
        if not self.serving:
            return
        self.now_counts.launches += 1
        self.spend(self.ledger.launch_ns)

    def forward(self) -> None:
        """The forward pass of the step that was prepared is queued."""
        if not self.serving:
            return
        program = self.program
        ns = self.pace.ns_of(program.sizes)
        program.end_ns = self.clock.launch(ns)
        program.begin_ns = program.end_ns - ns

    def run_pieces(self, pieces: int, kernels: int, between: int) -> None:
        """The forward pass of a step that has no graph of its own is queued, piece by piece: each is a graph,
        or all of them are so many `kernels`. `between` two of them are launches, of attention."""
        self.prepared()
        if not self.serving:
            return
        counts, program, ledger = self.now_counts, self.program, self.ledger
        counts.launches += kernels + between * (pieces - 1)
        counts.replays += 0 if kernels else pieces
        cost = kernels * ledger.launch_ns // pieces if kernels else ledger.replay_ns
        ns = self.pace.ns_of(program.sizes)
        for number in range(pieces):
            self.spend(cost + (between * ledger.launch_ns if number else 0))
            share = ns // pieces if number else ns - ns // pieces * (pieces - 1)
            program.end_ns = self.clock.launch(share)
            if not number:
                program.begin_ns = program.end_ns - share

    def replay(self) -> None:
        if self.serving:
            self.now_counts.replays += 1
        self.prepared()
        self.spend(self.ledger.replay_ns)
        self.forward()

    def wait(self, end_ns: int, program: Program | None = None, blocking: bool = False) -> None:
        """Sleep until then. Behind an event that blocks a thread sleeps on a card too, and is woken a little
        later; behind others it waits awake."""
        self.now_counts.events += 1
        shown = None if program is None else self.ranges
        if shown is not None and program is not None:
            shown.push(WAIT, program.step)
        began = perf_counter_ns()
        if began < end_ns:
            self.clock.wait(end_ns + (self.ledger.wake_ns if blocking else 0))
        if program is not None:
            program.wait_ns, program.woke_ns = began, perf_counter_ns()
        if shown is not None:
            shown.pop()

    def _charge(self, operations: int, copies: int) -> None:
        """Spend what so many cost, of all steps of this kind that were looked at."""
        if looked := self.now_counts.looked:
            self.spend(round((operations * self.ledger.launch_ns + copies * self.ledger.copy_ns) / looked))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around what a step asks of torch: in the first steps of a kind its operations are counted."""
        counts = self.now_counts
        if not self.serving or counts.steps > LOOKS:
            yield
            return
        counts.looked = counts.steps
        with _Looking(counts):
            yield

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Around what a step asks of torch once all else of it was launched: counted and charged here."""
        counts = self.now_counts
        operations, copies = counts.operations, counts.copies
        with self.counting():
            yield
        counts.delayed_operations += counts.operations - operations
        counts.delayed_copies += counts.copies - copies
        self._charge(counts.delayed_operations, counts.delayed_copies)


def sizes_of(prefilling: Any, scheduled: Any, lengths: Any, padded: int) -> list[Size]:
    """What a step computes. By request, as arrays: whether that is a prompt's, how many tokens, and how long
    it then is. A step of decodes alone is padded to so many tokens, as its graph is; each draft is a row."""
    sizes = []
    if not prefilling.all():
        rows = int(scheduled[~prefilling].sum()) if prefilling.any() else padded
        sizes.append(Size("decode", rows, rows, mean_context(lengths[~prefilling], rows)))
    if prefilling.any():
        prefills, tokens = int(prefilling.sum()), int(scheduled[prefilling].sum())
        sizes.append(Size("prefill", prefills, tokens, int(lengths[prefilling].max())))
    return sizes


def mean_context(lengths: Any, rows: int) -> int:
    """The context of each of so many rows whose attention reads as much as that of these: each reads its own,
    and one that pads a graph nothing."""
    return max(1, round(int(lengths.sum()) / rows))


class _Looking(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """Counts the operations that would be launches: all but views and allocations."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done, name = func(*args, **(kwargs or {})), func._schema.name
        if name in _CONVERSIONS:
            asked = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
            asked |= kwargs or {}
            # What crosses to the card or back says so; here it is the same memory, and may be no copy. What
            # torch does by itself, as for numpy(), stays on the host.
            if asked.get("copy") or asked.get("non_blocking"):
                self.counts.copies += 1
            elif done is not args[0]:
                self.counts.operations += 1
        elif name in _COPIES:
            self.counts.copies += 1
        elif not func.is_view and not name.startswith(_NO_LAUNCH):
            self.counts.operations += 1
        return done


# Reading one value back is no launch: an engine that waits for it says so.
_NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::detach", "aten::item", "aten::_local_scalar", "prim::")
_COPIES = {"aten::copy_", "aten::clone"}
_CONVERSIONS = {"aten::to", "aten::_to_copy"}  # the first in inference mode, the second elsewhere


class Event:
    """torch.cuda.Event: the clock's reading when it was recorded."""

    owner: Device

    def __init__(self, *given: Any, blocking: bool = False, **named: Any) -> None:
        self.end_ns = 0
        self.blocking = blocking
        self.program: Program | None = None

    def record(self, stream: Any = None) -> None:
        self.end_ns, self.program = self.owner.clock.free, self.owner.program

    def wait(self, stream: Any = None) -> None:
        """Another stream waits: there is one time line, on which it would stand behind anyway."""

    def synchronize(self) -> None:
        self.owner.wait(self.end_ns, self.program, self.blocking)

    def query(self) -> bool:
        return perf_counter_ns() >= self.end_ns

    def elapsed_time(self, other: Event) -> float:
        return (other.end_ns - self.end_ns) / 1e6


class Stream:
    """torch.cuda.Stream: all are one time line."""

    owner: Device
    cuda_stream = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.owner.wait(self.owner.clock.free)

    def query(self) -> bool:
        return perf_counter_ns() >= self.owner.clock.free

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class Graph:
    """torch.cuda.CUDAGraph: its replay is the forward pass of the step that was prepared."""

    owner: Device

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def replay(self) -> None:
        self.owner.replay()

    def pool(self) -> None:
        """What of its memory another graph may share: it has none."""


class Kernel:
    """What Triton launches a compiled kernel with (its driver's launcher_cls)."""

    owner: Device

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> None:
        self.owner.launch()


class _Utils:
    """The part of Triton's driver that loads binaries and knows the card. It loads none."""

    def load_binary(self, *given: Any) -> tuple[int, int, int, int, int]:
        return 1, 2, 32, 0, 1024

    def unload_module(self, module: Any) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32,
            "sm_clock_rate": 1755000, "mem_clock_rate": 2619000, "mem_bus_width": 5120,
        }  # fmt: skip


class Driver:
    """Triton's driver: kernels are compiled for an H100 (sm_90), for their Python is the host's work."""

    utils = _Utils()
    launcher_cls = Kernel

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def take_cuda(device: Device) -> None:
    """What torch and Triton know as CUDA in this process is this device from now on."""
    from triton.runtime.driver import driver

    Event.owner = Stream.owner = Graph.owner = Kernel.owner = device
    driver.set_active(Driver())
    for owner, names in _IN_PLACE.items():
        for name, value in names.items():
            setattr(owner, name, value)


def _nothing(*given: Any, **named: Any) -> None:
    pass


@contextmanager
def _within(*given: Any, **named: Any) -> Iterator[Stream]:
    yield Stream()


def _current(device: Any = None) -> Stream:
    return Stream()


def _synchronize(device: Any = None) -> None:
    """The host waits for all that was queued."""
    Event.owner.wait(Event.owner.clock.free)


def _memory(device: Any = None) -> tuple[int, int]:
    return 0, 0


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor.clone()


_IN_PLACE: dict[Any, dict[str, Any]] = {
    torch: {"Event": Event, "Stream": Stream},
    torch.cuda: {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": _within,
        "stream": _within,
        "set_stream": _nothing,
        "current_stream": _current,
    },
    torch.accelerator: {
        "synchronize": _synchronize,
        "empty_cache": _nothing,
        "get_memory_info": _memory,
    },
    torch.Tensor: {"record_stream": _nothing, "pin_memory": _pinned},
}
