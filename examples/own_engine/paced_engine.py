"""A complete engine of one's own, with one optimization to measure.

A step gives every running request one token, and takes STEP_US of an imaginary device. The host then takes
WRITE_US to write the output: while the device idles, or during the next step with output=deferred.

To try the gate, change STEP_US on a branch.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns as now

import overlap_bench as bench

STEP_US = 2000
WRITE_US = 200
VOCABULARY = 256

OUTPUT = bench.Toggle(
    name="output",
    choices=("inline", "deferred"),
    changes="a step's tokens are written while the next step runs",
    source="examples/own_engine",
    counters=("deferred_writes",),
)
SPEC = bench.EngineSpec(
    name="paced",
    summary="one token a request and step, and a step takes a fixed time",
    toggles=(OUTPUT,),
    build="paced_engine:build",
    takes_turns=True,
    phases=("output",),  # in which bench sensitivity delays it
    asks_text=True,  # it names no tokenizer, so prompts can't come as token ids
)


@dataclass(slots=True)
class Running:
    request: bench.Request
    accepted_ns: int
    tokens: int = 0


@dataclass(slots=True)
class PacedEngine(bench.Engine):
    options: bench.EngineOptions
    toggles: Mapping[str, str]
    running: list[Running] = field(default_factory=list)
    unwritten: list[bench.Event] = field(default_factory=list)
    record: array[int] = field(default_factory=lambda: array("q"))  # a row of bench.STEP_COLUMNS per step
    programs: array[int] = field(default_factory=lambda: array("q"))  # a row of bench.DeviceWork per step
    deferred_writes: int = 0
    delays: bench.Delay = field(default_factory=bench.Delay)

    def start(self, events: bench.EventSink) -> bench.Description:
        self.events = events
        return bench.Description(
            engine=SPEC.name,
            versions={},
            device={"kind": "cpu", "name": "the host"},
            model={"name": "none", "vocabulary": VOCABULARY, "context": self.options.max_context},
            toggles=dict(self.toggles),
            deterministic=True,
            pids={"engine": os.getpid()},
        )

    def submit(self, request: bench.Request) -> None:
        self.running.append(Running(request, now()))

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(0 if self.running or self.unwritten else None):
            if self.running:
                self.step()
            elif self.unwritten:
                self.write()

    def step(self) -> None:
        batch = len(self.running)
        facts = dict.fromkeys(bench.STEP_COLUMNS, -1)  # -1: what it does not have
        facts |= {"step": self.steps, "kind": bench.STEP_KINDS.index("decode"), "batch": batch}
        facts |= {"tokens": batch, "dropped": 0, "preempted": 0}
        launched = now()
        if self.toggles["output"] == "deferred" and self.unwritten:
            self.deferred_writes += 1
            facts["output.start"], facts["output.end"] = self.write()
        facts["wait.copy_done.start"], done = now(), spin(launched, STEP_US)
        facts["wait.copy_done.end"] = facts["append.start"] = done
        facts["append.end"] = self.append()
        if self.toggles["output"] == "inline":
            facts["output.start"], facts["output.end"] = self.write()
        self.record.extend(facts.values())
        self.programs.extend((0, facts["step"], launched, done))

    def append(self) -> int:
        """One token more for each that runs; returns when that ended."""
        at = now()
        for each in self.running:
            request = each.request
            token = (request.id + each.tokens) % VOCABULARY
            each.tokens += 1
            self.unwritten.append(bench.Chunk(request.id, [token], chr(token), [at]))
            if each.tokens == request.max_new_tokens:
                stamps = (each.accepted_ns,) * 3
                end = bench.Finish(request.id, "length", len(request.prompt), each.tokens, *stamps)
                self.unwritten.append(end)
        self.running = [each for each in self.running if each.tokens < each.request.max_new_tokens]
        return now()

    def write(self) -> tuple[int, int]:
        """Sends what is not written yet; returns when that began and ended."""
        began = now()
        spin(began, WRITE_US)
        self.delays.spend("output")
        self.events.send(self.unwritten)
        self.unwritten = []
        return began, now()

    def delay(self, phase: str, ns: int) -> int:
        return self.delays.put(phase, ns)

    def drain(self) -> None:
        """The other arm's turn comes: what is not written yet would be written on its time."""
        if self.unwritten:
            self.write()

    @property
    def steps(self) -> int:
        return len(self.record) // len(bench.STEP_COLUMNS)

    def begin_round(self) -> None:
        self.record, self.programs = array("q"), array("q")
        self.deferred_writes = 0

    def collect(self) -> bench.RoundRecord:
        return bench.RoundRecord(
            steps=bench.StepTable(list(bench.STEP_COLUMNS), self.steps, self.record.tobytes()),
            device_work=bench.DeviceWork(self.steps, self.programs.tobytes()),
            counters={"deferred_writes": self.deferred_writes},
        )


def spin(since: int, for_us: int) -> int:
    """Busy-waits until `for_us` after `since`; returns when that was."""
    while now() < since + for_us * 1000:
        pass
    return now()


def build(options: bench.EngineOptions, toggles: Mapping[str, str]) -> PacedEngine:
    return PacedEngine(options, toggles)
