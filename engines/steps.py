"""What the scheduler of an engine of others says of each step, as the records of a round.

A step, as far as that scheduler sees it: it is made, the model runs, and with its tokens on the host they are
appended. What lies between is what it tells of the model's time. On a CPU that is the model's own; on a card
it is that, and waiting for it.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from threading import get_native_id
from time import perf_counter_ns
from typing import TYPE_CHECKING

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.delay import Delay
from overlap_bench.engines.tracing import Window

if TYPE_CHECKING:
    from overlap_bench.engines.paced.device import Program

PREFILL, DECODE, MIXED = (api.STEP_KINDS.index(kind) for kind in ("prefill", "decode", "mixed"))
NOT_THERE = dict.fromkeys(api.STEP_COLUMNS, -1)
WIDTH = len(api.STEP_COLUMNS)
STREAMS = {"program": "forward"}
NAMES = [*api.PHASES, "send"]  # of a profile's ranges; what is sent is so on a thread beside the steps'


class Steps:
    """The steps of a round. They are told apart by the order in which they are made, which is that in which
    they end."""

    def __init__(self) -> None:
        self.preempted = 0  # requests, since the last step was made
        self.planted_ns = 0  # that a delay of a known size took (`--inject-delay`)
        self.counters: Counter[str] = Counter()  # of toggles
        # What was asked of a paced device so far, and before this round.
        self.ledger: Callable[[], Counter[str]] = Counter
        self._asked: Counter[str] = Counter()
        self.delay = Delay()
        self._made: deque[dict[str, int]] = deque()  # and not finished
        self._number = 0
        self._rows = array("q")
        self._programs = array("q")
        self._on_host_ns = 0  # when the tokens of the step before were
        self._thread = 0  # that the core runs on
        self.launching = 0  # the thread that prepares and launches steps, where that is another one
        self._window: Window | None = None  # of a profiled round
        self.outputs: list[int] = []  # of requests, that all steps up to each row have given
        self._sent = self._send_ns = 0  # outputs of requests, beside the steps, and how long it took
        self._sends: list[tuple[int, int, int]] = []  # where they are kept: see `processed`
        self._delayed = False  # in a round with delays
        self._sender = 0  # that thread

    @property
    def next(self) -> int:
        """The number of the step that may be made next."""
        return self._number

    @property
    def oldest(self) -> int:
        """The number of the step that is finished next; -1 where nothing runs in it."""
        return self._made[0].get("step", -1) if self._made else -1

    @property
    def begun(self) -> int:
        """How many are in flight, those apart in which nothing runs."""
        return sum(map(bool, self._made))

    def add(self, kind: int, batch: int, tokens: int, began_ns: int, ended_ns: int) -> None:
        """A step was scheduled, in that span: so many requests, and tokens for the model."""
        self._made.append(
            {
                "step": self._number,
                "kind": kind,
                "batch": batch,
                "tokens": tokens,
                "preempted": self.preempted,
                "schedule.start": began_ns,
                "schedule.end": ended_ns,
            }
        )
        if self._window is not None:
            self._thread = get_native_id()
            self._window.add_step(self._number, api.STEP_KINDS[kind])
        self._number += 1
        self.preempted = 0

    def finished(
        self,
        dropped: int,
        began_ns: int,
        ended_ns: int,
        program: Program | None = None,
        outputs: int = 0,
        given: int = -1,
    ) -> None:
        """The tokens of the oldest step were on the host, and are appended; those of `dropped` requests were
        not wanted any more. `program`: what a paced device knows of it. `outputs`: of requests, that it and
        all steps before it gave. `given`: tokens, where it may be more than one each."""
        facts = self._made.popleft()
        if not facts:
            return
        if program is None:
            # A device runs steps in order: a step scheduled ahead began when the one before it had ended.
            span = max(facts["schedule.end"], self._on_host_ns), began_ns
        else:
            span = program.begin_ns, program.end_ns
            facts |= {
                "metadata.start": program.prepare_ns,
                "metadata.end": program.launch_ns,
                "launch.start": program.launch_ns,
                "launch.end": program.launched_ns,
                "wait.copy_done.start": program.wait_ns,
                "wait.copy_done.end": program.woke_ns,
            }
        self._programs.extend((0, facts["step"], *span))
        self._on_host_ns = began_ns
        facts |= {"dropped": dropped, "given": given, "append.start": began_ns, "append.end": ended_ns}
        self._rows.extend((NOT_THERE | facts).values())
        self.outputs.append(outputs)

    def said(self) -> None:
        """What the latest finished step gave is detokenized and sent."""
        row = len(self._rows) - WIDTH
        if row < 0 or self._rows[row + api.STEP_COLUMNS.index("output.start")] != -1:
            return  # one step ahead, a turn's first call finishes none
        self.delay.spend("output")
        appended = self._rows[row + api.STEP_COLUMNS.index("append.end")]
        self.also("output", appended, perf_counter_ns())

    def also(self, phase: str, began_ns: int, ended_ns: int) -> None:
        """The latest finished step had this phase too, or had it then."""
        at = len(self._rows) - WIDTH + api.STEP_COLUMNS.index(f"{phase}.start")
        self._rows[at : at + 2] = array("q", (began_ns, ended_ns))

    def sending(self, outputs: int) -> None:
        """So many outputs of requests are about to be sent. They count before the host can have them: once it
        has all, it may begin a round."""
        self._sent += outputs

    def sent(self, began_ns: int) -> None:
        """They were serialized since then, and sent, on a thread beside the steps'."""
        self.delay.spend("send")
        ended_ns = perf_counter_ns()
        self._send_ns += ended_ns - began_ns
        if self._window is not None or self._delayed:
            self._sender = get_native_id()
            self._sends.append((self._sent, began_ns, ended_ns))

    def clear(self) -> None:
        """A round begins; the engine is idle."""
        del self._rows[:], self._programs[:], self.outputs[:], self._sends[:]
        self.counters.clear()
        self._asked = self.ledger()
        self._number = self.preempted = self.planted_ns = self._send_ns = 0
        self._window, self._delayed = None, False

    def put_delay(self, phase: str, ns: int) -> int:
        """Engine.delay, but for what other processes do."""
        self._delayed = True
        return self.delay.put(phase, ns)

    def begin_profile(self, steps: int) -> None:
        """A round begins that is profiled, with a window of so many steps of steady decode."""
        self.clear()
        self._window = Window()
        self._window.begin(steps)

    def record(self) -> api.RoundRecord:
        rows = len(self._rows) // WIDTH
        own = {"planted_host_ns": self.planted_ns, "send_ns": self._send_ns}
        counters = {**own, **self.counters, **(self.ledger() - self._asked)}
        return api.RoundRecord(
            steps=api.StepTable(list(api.STEP_COLUMNS), rows, self._rows.tobytes()),
            device_work=api.DeviceWork(rows, self._programs.tobytes()),
            counters={name: ns for name, ns in counters.items() if ns},
            profile=self._profile(),
            beside=[beside("send", self._sender, "send", self._sends)] if self._delayed else [],
        )

    def _profile(self) -> api.Profile | None:
        if self._window is None:
            return None
        self._window.end()
        threads = {self._sender: "send"} if self._sends else {}
        threads |= {self.launching: "forward"} if self.launching else {}
        threads |= {self._thread: "scheduler"}  # which may launch, too
        host = ranges("engine", threads, chain(self._phases(), self._sent_by_step()))
        return api.Profile(
            opened_ns=self._window.opened_ns, closed_ns=self._window.closed_ns, hosts=[host], streams=STREAMS
        )

    def _phases(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The rows of api.HostRanges."""
        columns = [
            (number, api.STEP_COLUMNS.index(f"{phase}.start")) for number, phase in enumerate(api.PHASES)
        ]
        for row in range(0, len(self._rows), WIDTH):
            for number, at in columns:
                start, end = self._rows[row + at : row + at + 2]
                if start >= 0:
                    launches = self.launching and api.PHASES[number] in ("metadata", "launch")
                    thread = self.launching if launches else self._thread
                    yield thread, number, self._rows[row], start, end

    def _sent_by_step(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Likewise."""
        for step, start, end in processed(self._sends, self._rows, self.outputs):
            yield self._sender, NAMES.index("send"), step, start, end


def ranges(
    role: str, threads: dict[int, str], rows: Iterable[tuple[int, int, int, int, int]]
) -> api.HostRanges:
    """What threads of this process did."""
    found = sorted(rows, key=lambda row: row[4])
    return api.HostRanges(
        role=role,
        pid=os.getpid(),
        threads=threads,
        names=NAMES,
        rows=len(found),
        data=array("q", chain.from_iterable(found)).tobytes(),
    )


def beside(phase: str, thread: int, name: str, spans: Iterable[tuple[int, int, int]]) -> api.HostRanges:
    """What RoundRecord.beside has of a phase that the thread of that name did: of `spans` the last two."""
    rows = [(thread, 0, -1, began, ended) for _, began, ended in spans]
    return msgspec.structs.replace(ranges("engine", {thread: name}, rows), names=[phase])


def processed(
    spans: list[tuple[int, int, int]], values: array[int], outputs: list[int]
) -> Iterator[tuple[int, int, int]]:
    """When the outputs of each step were handled by another thread or process: step, begin and end, ns, one
    row for each of `spans`: how many outputs of requests were handled by then, begin, end. `values`: of the
    step records; `outputs`: how many each row of them and all before it gave."""
    for before, (row, upto) in pairwise([(-1, 0), *enumerate(outputs)]):
        for count, began, ended in spans:
            if before[1] < count <= upto:
                yield values[row * WIDTH], began, ended
