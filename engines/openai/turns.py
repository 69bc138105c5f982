"""Turns of a server that knows nothing of them: it is stopped while another arm has the machine.

A step of it is over once every request that decodes has got its next chunk. Behind the last step of a turn
all of its processes get SIGSTOP, and SIGCONT when its turn comes again. Nothing is lost by that: what it was
computing goes on where it stood, and what it had sent is in our sockets. But a turn begins and ends in the
middle of a step, so no interval ends with the first steps of a turn (LEAD in harness/plan/settings.py).
"""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic, perf_counter_ns, sleep

import psutil

from overlap_bench.engines import api
from overlap_bench.engines.openai.replies import Outcome, Reply, arrival
from overlap_bench.engines.processes import session, state, with_below
from overlap_bench.engines.steps import DECODE, MIXED, NOT_THERE, PREFILL

LOOK_S, LONG_LOOK_S = 0.0001, 0.002  # between two looks whether a process has stopped: the first, and most
STOPPED_S = 5.0  # how long that may take
ROLE = b'"role"'  # as a key: within a text its quotation marks are escaped
FEW = 0.05  # of the chunks of a reply, those that may hold two tokens where their number is not told
# A server has not stopped where half of a long turn's steps come within this share of the time that it was
# to stand still (or one less: of two such servers, each has just half). What it had begun, and what it
# does in that time, is less, unless its step is a fifth of the other arm's. Of a short turn three
# quarters must come so soon; it is asked where replies are too short for long ones.
LONG_TURN, SHORT_TURN, SOON = 12, 4, 0.05


class Steps:
    """Which step of a server each chunk belongs to, told from their order.

    The first one lasts until each of `requests` has its first chunk, or one of them has ended: a server takes
    them in one after the other. Each step behind it gives every request that has not ended its next chunk.
    """

    def __init__(self, requests: Iterable[int]) -> None:
        self.over = 0  # how many steps are
        self._missing = set(requests)  # those without a chunk, while the first step lasts
        self._latest: dict[int, int] = {}  # step of the latest chunk of each request that has not ended
        self._last = 0  # step that was begun

    def came(self, request: int) -> int:
        """The step of the chunk that came, by number."""
        if self._missing:
            step = 0
            self._missing.discard(request)
        else:
            step = self._latest.get(request, self._last - 1) + 1
        self._latest[request] = step
        self._last = max(self._last, step)
        self._look()
        return step

    def ended(self, request: int) -> None:
        """Note that a request gets nothing more."""
        self._missing.clear()
        self._latest.pop(request, None)
        self._look()

    def _look(self) -> None:
        if not self._missing:
            self.over = max(self.over, 1 + min(self._latest.values(), default=self._last))


@dataclass(slots=True)
class _Step:
    """What one step gave."""

    end_ns: int = -1  # when the last of it was here
    requests: int = 0
    tokens: int = 0
    first: int = 0  # of its chunks, those that are the first of their request


class Turning:
    """The turns of one set of requests. `pid`: the server, which is stopped until its first turn."""

    def __init__(self, pid: int) -> None:
        self._processes = Processes(pid)
        self._processes.find()
        self._steps: Steps | None = None  # until the first turn
        self._step_of: dict[int, list[int]] = {}  # each event of each reply, in the order in which they came
        self._seen: dict[int, int] = {}  # of the pieces of each reply
        self._wanted = 0  # steps, with the one that was begun last
        self._begun: list[tuple[int, int]] = []  # turns: their first step, and when it went on
        self._parked_ns: list[int] = []  # when it was stopped behind each of them
        self._gave: dict[int, _Step] = {}
        # Steps that are like none of the other arm. In some a request is not there any more, which was taken
        # in before others and is ahead of them; of some it is not known how many tokens they gave.
        self._apart = set[int]()

    def begin_step(self, awaited: Iterable[Reply]) -> bool:
        """Let the server go on; `awaited` are the replies that it has not ended. Whether it was stopped."""
        if self._steps is None:
            self._steps = Steps(each.request for each in awaited)
        was_stopped = self._processes.stopped
        if was_stopped:
            self._begun.append((self._wanted, perf_counter_ns()))
            self._processes.go_on()
        self._wanted += 1
        return was_stopped

    @property
    def step_is_over(self) -> bool:
        return self._steps is not None and self._steps.over >= self._wanted

    def read(self, awaited: Iterable[Reply], ended: Collection[Reply]) -> None:
        """There was something to read, of these replies. Their events are counted, and not looked into, but
        for the first: that of a chat gives a role, and no token. Taken for the chunk that a request's first
        step gives, it would put the request that is taken in last a step ahead of the others.
        Where a server's first event gives a token too, its first step is two."""
        if self._steps is None:
            return
        came = []
        roles = set[int]()
        for each in (*awaited, *ended):
            if each.request not in self._step_of and ROLE in b"".join(each.pieces):
                roles.add(each.request)
            for place in range(self._seen.get(each.request, 0), len(each.pieces)):
                came += [(arrival(each, place), each.request)] * _events(each.pieces[place])
            self._seen[each.request] = len(each.pieces)
        for _, request in sorted(came):
            numbers = self._step_of.setdefault(request, [])
            numbers.append(self._steps.came(request) if numbers or request not in roles else 0)
        for each in ended:
            self._steps.ended(each.request)

    def park(self) -> None:
        self._processes.stop()
        self._parked_ns.append(perf_counter_ns())

    def end(self) -> None:
        self._processes.go_on()

    def finished(self, chunks: Sequence[api.Chunk], found: Outcome) -> None:
        """All that came for one request."""
        if not chunks or chunks[0].id not in self._step_of:
            return
        events = self._step_of[chunks[0].id]
        numbers = [events[min(place, len(events) - 1)] for place in found.places]
        self._apart.update(range(numbers[-1] + 1, numbers[-1] + numbers.count(0)))
        (end,) = (each for each in found.events if isinstance(each, api.Finish))
        one_each = end.completion_tokens <= len(chunks) * (1 + FEW)
        for chunk, number in zip(chunks, numbers, strict=True):
            tokens = len(chunk.token_ids) if chunk.tokens is None else chunk.tokens
            if tokens < 0 and not one_each:
                self._apart.add(number)
            step = self._gave.setdefault(number, _Step())
            step.end_ns = max(step.end_ns, chunk.arrived_ns)
            step.requests += 1
            step.tokens += max(1, tokens)
            step.first += chunk is chunks[0]

    @property
    def ran_on(self) -> bool:
        """Whether it worked while it was stopped, as on another machine (`ssh -L`): when its turns begin,
        half of their steps are there at once, or three quarters where turns are short."""
        long, short = list[bool](), list[bool]()
        turns = pairwise((*self._begun[1:], (self._wanted, 0)))
        for parked_ns, ((first, begun_ns), (behind, _)) in zip(self._parked_ns, turns, strict=False):
            steps = behind - first
            soon_ns = begun_ns + SOON * (begun_ns - parked_ns)
            ends = [self._gave[each].end_ns for each in range(first, behind) if each in self._gave]
            soon = sum(end < soon_ns for end in ends)
            if steps >= LONG_TURN:
                long.append(soon >= steps // 2 - 1)
            elif steps >= SHORT_TURN:
                short.append(4 * soon >= 3 * steps)
        early = long if len(long) > 1 else short
        return len(early) > 1 and 2 * sum(early) > len(early)

    def table(self) -> api.StepTable:
        """The steps that another arm can have too. They have no phases but the instant at which their tokens
        were here, as "append.start" and "append.end"."""
        rows = array("q")
        ends = self._ends()
        for number, end_ns in ends.items():
            step = self._gave[number]
            kind = DECODE if not step.first else PREFILL if step.first == step.requests else MIXED
            facts = {
                "step": number, "kind": kind, "batch": step.requests, "tokens": step.tokens, "dropped": 0,
                "preempted": 0, "append.start": end_ns, "append.end": end_ns,
            }  # fmt: skip
            rows.extend((NOT_THERE | facts).values())
        return api.StepTable(list(api.STEP_COLUMNS), len(ends), rows.tobytes())

    def _ends(self) -> dict[int, int]:
        """When each step of use ended, within the turn that it counts for: what a server sends behind the
        last step of one, until it stands still, is the beginning of its next, and of none behind the last. A
        turn whose first two steps were over when it began has no whole interval behind them."""
        found = dict[int, int]()
        for (first, begun_ns), (behind, _) in pairwise((*self._begun, (self._wanted, 0))):
            ends = {each: self._gave[each].end_ns for each in range(first, behind) if each in self._gave}
            if all(ends.get(each, begun_ns) < begun_ns for each in (first, first + 1)):
                continue
            found |= {each: max(end, begun_ns) for each, end in ends.items() if each not in self._apart}
        return found


def _events(piece: bytes) -> int:
    """How many end in a piece of a stream; comments, which keep a connection alive, are none."""
    return 0 if piece.startswith(b":") else piece.count(b"\n\n") + piece.count(b"\r\n\r\n")


@dataclass(slots=True)
class Processes:
    """Everything that a server has started, to be stopped and let go on as one."""

    pid: int
    pids: list[int] = field(default_factory=list)  # those that are found before they are stopped anew
    stopped: bool = False

    def find(self) -> None:
        """Stop them all, whatever was started since."""
        self.pids.clear()
        while new := sorted(self._running() - set(self.pids)):  # a process that is stopped starts none
            self.pids += new
            self.stop()

    def stop(self) -> None:
        """Returns when none of them runs any more. Raises EngineError where one will not stop."""
        self.stopped = True
        self._send(signal.SIGSTOP)
        deadline = monotonic() + STOPPED_S
        look_s = LOOK_S
        for pid in self.pids:
            while state(pid) not in "TZX":
                if monotonic() > deadline:
                    raise api.EngineError(f"process {pid} of the server did not stop for another arm's turn")
                sleep(look_s)
                look_s = min(2 * look_s, LONG_LOOK_S)

    def go_on(self) -> None:
        """Nothing where they were not stopped."""
        if self.stopped:
            self.stopped = False
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            except PermissionError:
                raise api.EngineError(
                    f"process {pid} of the server is another user's, and can't be stopped for another arm's "
                    "turn; --interleaved-rounds 0 compares by rounds"
                ) from None

    def listen_on(self, port: int) -> bool:
        """Whether one of them listens there. What serves elsewhere, as in a container, would not stop."""
        for pid in self._running():
            with suppress(psutil.Error):
                for each in psutil.Process(pid).net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                        return True
        return False

    def _running(self) -> set[int]:
        found = with_below([self.pid])
        # What lost its parent is in the host's session still.
        return {*found, *session()} if found else set()
