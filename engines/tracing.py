"""NVTX ranges, for whoever looks on with a profiler such as Nsight Systems.

Each process has a domain of its own, named after its role: "engine", "output process", "device process",
"tokenizer", "load generator". A range is a registered string, its category has the same name, its payload is
a number: the step, or the request. Attributes are made once, so that a range costs a store and two calls.
Where no tool is attached there are no ranges at all: what makes them is chosen at boot, or left out.

In a round that is profiled, the steps of its window are inside the range WINDOW of the domain
WINDOW_DOMAIN, which a capture range of nsys looks for.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from threading import get_ident, get_native_id
from time import perf_counter_ns
from typing import Any

from overlap_bench.engines.api import HostRanges

# A tool is loaded by the NVTX library of the process itself, which looks for it here.
INJECTIONS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
WINDOW, WINDOW_DOMAIN = "steady-decode", "profile"
SETTLED = 8  # decode steps in a row, after which decode counts as steady


class Ranges:
    """The ranges of one domain, by their place in `names`. They nest per thread.

    The attributes of a name are one object, whose payload is set in front of each push: two threads must not
    push the same name.
    """

    def __init__(self, domain: Any, names: Sequence[str]) -> None:
        self._push = domain.push_range
        self._attributes = [domain.get_event_attributes(message=name, category=name) for name in names]
        self.pop = domain.pop_range

    def push(self, name: int, payload: int) -> None:
        attributes = self._attributes[name]
        attributes.payload = payload
        self._push(attributes)


def listening() -> bool:
    """Whether a tool may be attached to this process; finding that out imports nothing."""
    return any(os.environ.get(variable) for variable in INJECTIONS)


def open_ranges(domain: str, names: Sequence[str]) -> Ranges | None:
    """The ranges of a domain, or None where no tool is attached."""
    if not listening():
        return None
    import nvtx

    found = nvtx.get_domain(domain)
    # For a domain that nobody listens to, nvtx gives a dummy without a handle; it does so too where a tool is
    # too old to be asked (Nsight Systems 2022.4), although that one listens.
    return Ranges(found if hasattr(found, "handle") else _unasked(domain), names)


def _unasked(name: str) -> Any:
    """A domain as nvtx would make it for a tool that says it listens; pushes into one that is excluded
    (--nvtx-domain-exclude) go nowhere. Its handle is private to nvtx, there is no public way to it."""
    from nvtx._lib.lib import Domain, DomainHandle

    domain: Any = object.__new__(Domain)
    domain.handle = DomainHandle(name)
    domain.__init__(name)
    return domain


class Window:
    """Steady decode in a profiled round, which a tool sees too: it opens after SETTLED decode steps in a row,
    and holds the next `steps` steps, whatever they are. `opened_ns` and `closed_ns` are -1 until then."""

    def __init__(self) -> None:
        self._mark = open_ranges(WINDOW_DOMAIN, [WINDOW])
        self._steps = 0  # 0: none is to be marked
        self._in_a_row = 0
        self._last = 0  # the window ends where this step begins
        self.opened_ns = self.closed_ns = -1

    def begin(self, steps: int) -> None:
        """A round begins that is to have a window of so many steps."""
        self._steps, self._in_a_row = steps, 0
        self.opened_ns = self.closed_ns = -1

    def end(self) -> None:
        """The round is over. A window that is still open never was one."""
        if self.opened_ns >= 0 and self.closed_ns < 0 and self._mark is not None:
            self._mark.pop()
        self._steps = 0

    def add_step(self, step: int, kind: str) -> None:
        if not self._steps or self.closed_ns >= 0:
            return
        self._in_a_row = self._in_a_row + 1 if kind == "decode" else 0
        if self.opened_ns < 0 and self._in_a_row > SETTLED:
            self.opened_ns, self._last = perf_counter_ns(), step + self._steps
            if self._mark is not None:
                self._mark.push(0, self._steps)
        elif self.opened_ns >= 0 and step >= self._last:
            self.closed_ns = perf_counter_ns()
            if self._mark is not None:
                self._mark.pop()


class RangeLog:
    """What the threads of a process do: told to NVTX where a tool listens, and kept in rounds that are
    profiled."""

    def __init__(self, domain: str, names: Sequence[str]) -> None:
        self._names = names
        self._nvtx = open_ranges(domain, names)
        self._kept: list[tuple[int, int, int, int, int]] | None = None

    def begin(self, name: int, step: int) -> int:
        """A range begins on this thread; hand what comes back to `end`."""
        if self._nvtx is not None:
            self._nvtx.push(name, step)
        return perf_counter_ns()

    def end(self, name: int, step: int, began: int) -> None:
        """It ends. What belongs to no step (-1) is not kept."""
        if self._kept is not None and step >= 0:
            self._kept.append((get_ident(), name, step, began, perf_counter_ns()))
        if self._nvtx is not None:
            self._nvtx.pop()

    def keep(self) -> None:
        """From now on."""
        self._kept = []

    def take(self, role: str, main_thread: str) -> HostRanges:
        """What was kept; its threads must still be alive. From now on nothing is. The main thread is called
        `main_thread`, the others as they were when they were made."""
        kept, self._kept = self._kept or [], None
        alive = threading.enumerate()
        native = {thread.ident: thread.native_id or 0 for thread in alive}
        called = {thread: thread.name for thread in alive} | {threading.main_thread(): main_thread}
        rows = [(native[thread], *rest) for thread, *rest in kept]
        return HostRanges(
            role=role,
            pid=os.getpid(),
            threads={native[thread.ident]: name for thread, name in called.items()},
            names=list(self._names),
            rows=len(rows),
            data=array("q", chain.from_iterable(rows)).tobytes(),
        )


def name_thread(name: str) -> None:
    """Name the calling thread for whoever looks from outside: profilers, top. At most 15 bytes are kept. Some
    sandboxes allow no name, and nothing depends on it."""
    with suppress(OSError):
        Path(f"/proc/self/task/{get_native_id()}/comm").write_bytes(name.encode())
