"""A delay of a known size in one phase of each step, to see what a step makes of it (`bench sensitivity`)."""

from __future__ import annotations

from time import perf_counter_ns


class Delay:
    """An engine keeps one, hands `put` on (Engine.delay), and calls `spend` at the end of each phase that can
    be delayed. It is spent busy, and holds the interpreter, as more Python in that place would."""

    def __init__(self) -> None:
        self.phase = ""  # in which it is spent
        self._ns = self._spent_ns = 0

    def put(self, phase: str, ns: int) -> int:
        """From now on into this phase; into none, where `ns` is 0. What was spent since the last call, ns."""
        self.phase, self._ns = phase if ns else "", ns
        spent, self._spent_ns = self._spent_ns, 0
        return spent

    def spend(self, phase: str) -> None:
        """Spend the delay if it is in this phase, which ends now."""
        if phase != self.phase:
            return
        self._spent_ns += spin(self._ns)


def spin(ns: int) -> int:
    """Compute for `ns`; how long that took, ns."""
    began = perf_counter_ns()
    end = began + ns
    while (now := perf_counter_ns()) < end:
        pass
    return now - began
