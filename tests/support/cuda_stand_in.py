"""What engines/devices/cuda.py uses of torch.cuda, played by the CPU: to test that file's own logic (captures
and replays, anchors, pairs of events, counters, threads and streams) without a card.

Commands run at once and in order, so nothing overlaps and no race can show: what a card does is left to the
tests marked `gpu`. It is as strict as torch where it can be: much of what a capture forbids raises, a graph
replays what was captured on the tensors it was captured with, and an event that has not happened has no time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

_CPU = torch.device("cpu")
# They ask the host for a number or for a size, or feed it one.
_FORBIDDEN = (
    "aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh", "aten.masked_select", "aten._unique2",
    "aten.bincount", "aten.repeat_interleave.self_Tensor", "aten.repeat_interleave.Tensor",
)  # fmt: skip
_BY_A_MASK = ("aten.index.", "aten.index_put")  # how many rows that is, only the host can be told


class _Capture(TorchDispatchMode):
    """Runs operations and keeps them."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = str(func).startswith(_BY_A_MASK) and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if str(func).startswith(_FORBIDDEN) or masks:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self._graph.nodes.append((func, args, kwargs or {}, result))
        return result


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.captured = False

    def replay(self) -> None:
        assert self.captured, "replayed before its capture ended"
        assert _state.capturing is None, "replayed in a capture"
        with torch.inference_mode():
            for node in self.nodes:
                if isinstance(node, Event):
                    node.happen()
                    continue
                func, args, kwargs, kept = node
                inputs = {_storage(each) for each in tree_flatten((args, kwargs))[0] if _is_tensor(each)}
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(kept)[0], tree_flatten(again)[0], strict=True):
                    if _is_tensor(old) and _storage(old) not in inputs:  # else written in place, or a view
                        old.copy_(new)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _State(threading.local):
    """What torch holds for each thread."""

    stream: Stream | None = None
    capturing: Graph | None = None


_state = _State()


class Stream:
    """torch.cuda.Stream. Whatever is put on it has run when the call returns."""

    def __init__(self, device: Any = None) -> None:
        assert device is None or device == _CPU

    def synchronize(self) -> None:
        assert _state.capturing is None, "a capture can't wait"

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert _state.capturing is None
        assert event.ns, "waits for an event that nobody recorded"


class Event:
    """torch.cuda.Event. `external`: recorded in a capture it happens at each replay; to record any other
    there fails, though torch allows it."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False,
    ) -> None:  # fmt: skip
        self.timed, self.external = enable_timing, external
        self.ns = 0

    def happen(self) -> None:
        self.ns = perf_counter_ns()

    def record(self, stream: Stream | None = None) -> None:
        if _state.capturing is None:
            self.happen()
        else:
            assert self.external, "recorded in a capture, and orders nodes only"
            _state.capturing.nodes.append(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert _state.capturing is None, "a capture can't wait"

    def elapsed_time(self, other: Event) -> float:
        if not (self.timed and other.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.ns and other.ns):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(np.float32((other.ns - self.ns) / 1e6))  # as the card has it: float32 milliseconds


@contextmanager
def capture(
    graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert capture_error_mode in ("global", "thread_local", "relaxed")
    assert not graph.nodes, "captured twice"
    with _on(stream):
        _state.capturing = graph
        try:
            with _Capture(graph):
                yield
        finally:
            _state.capturing = None
        graph.captured = True


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before, _state.stream = _state.stream, stream
    try:
        yield
    finally:
        _state.stream = before


def _set_stream(stream: Stream) -> None:
    assert _state.capturing is None
    _state.stream = stream


def _nothing() -> Callable[..., None]:
    """A call that is not for a capture, and does nothing; each its own, as torch._dynamo lists them."""

    def nothing(*_: Any) -> None:
        assert _state.capturing is None, "not in a capture"

    return nothing


class _Torch:
    """The module torch with this torch.cuda, whose card is the CPU."""

    def __init__(self, pinned: list[int]) -> None:
        self._pinned = pinned
        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=Stream,
            CUDAGraph=Graph,
            graph=capture,
            stream=_on,
            set_stream=_set_stream,
            set_device=_nothing(),
            synchronize=_nothing(),
            empty_cache=_nothing(),
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_name=lambda _=None: "stand-in",
            current_device=lambda: 0,
            graph_pool_handle=object,
            get_device_properties=lambda _: SimpleNamespace(
                name="stand-in", major=9, minor=0, total_memory=1 << 37
            ),
            max_memory_allocated=lambda _: 0,
            mem_get_info=lambda _=None: (1 << 36, 1 << 37),
            host_memory_stats=lambda: {"allocated_bytes.peak": sum(self._pinned)},
            _sleep=lambda cycles: sleep(cycles / 2e9),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int = 0) -> torch.device:
        assert kind == "cuda"
        return _CPU

    def zeros(self, *size: Any, pin_memory: bool = False, device: Any = None, **more: Any) -> torch.Tensor:
        made = _zeros(*size, device=_without_card(device), **more)
        if pin_memory:
            self._pinned.append(made.nbytes)
        return made

    def empty(self, *size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        return _empty(*size, device=_without_card(device), **more)


_zeros, _empty = torch.zeros, torch.empty  # torch's own, also where these stand in their place


def _without_card(device: Any) -> Any:
    return _CPU if str(device).startswith("cuda") else device


def _card() -> tuple[_Torch, Callable[[torch.Tensor], torch.Tensor]]:
    """torch with a card, and Tensor.pin_memory on it."""
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.nbytes)
        return tensor.clone()

    return _Torch(pinned), pin


def stand_in(monkeypatch: Any) -> None:
    """Have engines.devices.cuda find a card."""
    card, pin = _card()
    monkeypatch.setattr("overlap_bench.engines.devices.cuda.torch", card)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)


def stand_in_everywhere() -> _Torch:
    """Have all of this process find one. What makes a torch.device of it needs the torch that is returned."""
    card, pin = _card()
    played = [(torch, "zeros", card.zeros), (torch, "empty", card.empty), (torch.Tensor, "pin_memory", pin)]
    played += [(torch.cuda, name, each) for name, each in vars(card.cuda).items()]
    for owner, name, each in played:
        setattr(owner, name, each)
    return card
