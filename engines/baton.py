"""Turns: several engines on one machine that run a few steps each, one at a time.

Whoever holds the baton runs so many steps, finishes what it began, passes the baton on and sleeps.
Neighbouring turns meet the same noise, so their difference has little of it (harness/stats/stats.md,
"Turns"). All of this happens inside `pump`, which an engine calls between two steps; of the engine it needs
`drain` alone.

The baton is one byte in the holder's FIFO: how many engines in a row had nothing left to do. Once all have
been asked in vain, it is dropped.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import cycle
from time import perf_counter_ns

from overlap_bench.engines.api import TURN_COLUMNS, BeginTurns, Engine, TurnTable
from overlap_bench.engines.contention import Others

PATIENCE_S = 10.0  # how long a turn may take, at least
FIRST = 6  # times as long while this engine has had none: a first turn takes all prompts in
LONGER = 20  # how much longer than this engine's own longest turn


class Turns:
    """One engine's turns on one set of requests. `own`: its FIFO, for reading; `pids`: all its processes;
    `delay`: the engine's (api.Engine.delay)."""

    def __init__(
        self,
        order: BeginTurns,
        own: int,
        pids: Collection[int],
        delay: Callable[[str, int], int] = lambda phase, ns: 0,
    ) -> None:
        self.order = order
        self.requests = 0  # that have come so far
        self.holding = False
        self._own = own
        _empty(own)  # of a baton that was still on its way when the turns before these were ended
        self._next = os.open(order.next, os.O_WRONLY | os.O_NONBLOCK)
        self._clocks = [~pid << 3 | 2 for pid in pids]  # clock_getcpuclockid(3)
        self._delay, self._delays = delay, cycle(order.delays)
        self._others = Others([*order.run, *pids])
        self._rows = array("q")
        self._steps = 0  # of this turn
        self._taken_ns = 0
        self._others_ns = 0  # of them, as the turn began
        self._idle = False  # it has nothing left to do
        self._parked_ns, self._parked_cpu_ns = perf_counter_ns(), self._cpu_ns()
        self._longest_ns = 0

    def count_request(self) -> bool:
        """One more has come. Whether it is the last: from then on this engine only waits for the baton."""
        self.requests += 1
        if self.requests < self.order.requests:
            return False
        self._parked_ns, self._parked_cpu_ns = perf_counter_ns(), self._cpu_ns()
        return True

    @property
    def patience_s(self) -> float:
        """How long to wait for the baton before whoever has it is taken to hang: all other arms have their
        turns meanwhile."""
        if not self._longest_ns:
            return FIRST * PATIENCE_S
        others = 2 * (self.order.arms - 2)  # one may be slow; the rest take as long as this engine, or twice
        return max(PATIENCE_S, (LONGER + others) * self._longest_ns / 1e9)

    def take(self) -> bool:
        """The baton is there. False where this engine had nothing to do with it, and has passed it on."""
        passes = os.read(self._own, 1)[0]
        if self._idle:
            if passes + 1 < self.order.arms:
                os.write(self._next, bytes([passes + 1]))
            return False
        cpu, self._others_ns = self._cpu_ns(), self._others.cpu_ns()
        self._taken_ns = perf_counter_ns()
        self._rows.extend((self._taken_ns - self._parked_ns, cpu - self._parked_cpu_ns))
        self.holding, self._steps = True, 0
        if self.order.delays:
            self._delay(*next(self._delays))
        return True

    def between_steps(self, engine: Engine, idle: bool) -> None:
        """The engine calls `pump`, having run a step, or (`idle`) having none to run. Costs 0.2 us within a
        turn."""
        if not self.holding:
            return
        self._idle = idle
        self._steps += not idle
        if self._steps < self.order.steps and not idle:
            return
        engine.drain()
        delayed = self._delay("", 0) if self.order.delays else 0
        drained = perf_counter_ns()
        self.holding = False
        self._parked_ns, self._parked_cpu_ns = drained, self._cpu_ns()
        self._longest_ns = max(self._longest_ns, drained - self._taken_ns)
        held = self._others.held_ns(self._others_ns, self._others.cpu_ns(), drained - self._taken_ns)
        self._rows.extend((self._taken_ns, drained, held, delayed))
        os.write(self._next, bytes([1 if idle else 0]))

    def table(self) -> TurnTable:
        whole = len(self._rows) // len(TURN_COLUMNS) * len(TURN_COLUMNS)
        return TurnTable(whole // len(TURN_COLUMNS), self._rows[:whole].tobytes())

    def close(self) -> None:
        os.close(self._next)

    def _cpu_ns(self) -> int:
        return sum(time.clock_gettime_ns(clock) for clock in self._clocks)


def _empty(fifo: int) -> None:
    with suppress(BlockingIOError):
        while True:
            os.read(fifo, 64)
