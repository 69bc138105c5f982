"""An engine that takes turns, and does so well or badly: a step is a sleep, and there is no device."""

import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns as now

from overlap_bench.engines import api, baton

STEP_S = 0.001

SPEC = api.EngineSpec(
    name="turning",
    summary="sleeps a step at a time, for tests of turns",
    toggles=(
        api.Toggle("turn", ("ends", "hangs", "computes"), "what it does with its turns", "tests", {}),
        api.Toggle("patience", ("long", "short"), "how long it waits for the baton", "tests", {}),
    ),
    build="turning_engine:build",
    takes_turns=True,
    asks_text=True,
)


@dataclass(slots=True)
class Turning(api.Engine):
    options: api.EngineOptions
    toggles: Mapping[str, str]
    left: dict[int, int] = field(default_factory=dict)  # tokens to come, by request
    record: array[int] = field(default_factory=lambda: array("q"))
    programs: array[int] = field(default_factory=lambda: array("q"))

    def start(self, events: api.EventSink) -> api.Description:
        self.events = events
        if self.toggles["patience"] == "short":
            baton.PATIENCE_S = 0.5
        if self.toggles["turn"] == "computes":
            threading.Thread(target=compute, daemon=True).start()
        return api.Description(
            engine=SPEC.name,
            versions={},
            device={"kind": "cpu", "name": "none"},
            model={"name": "none", "vocabulary": 256, "context": self.options.max_context},
            toggles=dict(self.toggles),
            deterministic=True,
            pids={"engine": os.getpid()},
        )

    def submit(self, request: api.Request) -> None:
        self.left[request.id] = request.max_new_tokens

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(0 if self.left else None):
            if self.left:
                self.step()

    def step(self) -> None:
        began = now()
        number = len(self.record) // len(api.STEP_COLUMNS)
        if self.toggles["turn"] == "hangs" and number == 5:
            time.sleep(1000)
        time.sleep(STEP_S)
        facts = dict.fromkeys(api.STEP_COLUMNS, -1) | {
            "step": number,
            "kind": api.STEP_KINDS.index("decode"),
            "batch": len(self.left),
            "tokens": len(self.left),
            "dropped": 0,
            "preempted": 0,
        }
        self.record.extend(facts.values())
        self.programs.extend((0, number, began, now()))
        for request in list(self.left):
            self.left[request] -= 1
            said: list[api.Event] = [api.Chunk(request, [1], "a", [now()])]
            if not self.left[request]:
                del self.left[request]
                said.append(api.Finish(request, "length", 1, self.asked, -1, -1, -1))
            self.events.send(said)

    @property
    def asked(self) -> int:
        """Every request asks for as many."""
        return 32

    def begin_round(self) -> None:
        self.record, self.programs = array("q"), array("q")

    def collect(self) -> api.RoundRecord:
        rows = len(self.record) // len(api.STEP_COLUMNS)
        return api.RoundRecord(
            steps=api.StepTable(list(api.STEP_COLUMNS), rows, self.record.tobytes()),
            device_work=api.DeviceWork(rows, self.programs.tobytes()),
        )


def compute() -> None:
    while True:
        sum(range(1000))


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> Turning:
    return Turning(options, toggles)
