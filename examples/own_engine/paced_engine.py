"""A complete engine of one's own, as small as it gets: each step computes for STEP_US and gives every running
request one token. To try the gate on: change STEP_US on a branch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engines import api

STEP_US = 2000
VOCABULARY = 256

SPEC = api.EngineSpec(
    name="paced",
    summary="one token a request and step, and a step takes a fixed time",
    toggles=(),
    build="paced_engine:build",
    asks_text=True,  # it names no tokenizer, so prompts can't come as token ids
)


@dataclass(slots=True)
class Running:
    request: api.Request
    accepted_ns: int
    sent: int = 0


@dataclass(slots=True)
class PacedEngine(api.Engine):
    options: api.EngineOptions
    running: list[Running] = field(default_factory=list)

    def start(self, events: api.EventSink) -> api.Description:
        self.events = events
        return api.Description(
            engine=SPEC.name,
            versions={},
            device={"kind": "cpu", "name": "the host"},
            model={"name": "none", "vocabulary": VOCABULARY, "context": self.options.max_context},
            toggles={},
            deterministic=True,
            pids={"engine": os.getpid()},
        )

    def submit(self, request: api.Request) -> None:
        self.running.append(Running(request, time.perf_counter_ns()))

    def run(self, pump: Callable[[float | None], bool]) -> None:
        while pump(0 if self.running else None):
            if self.running:
                self.step()

    def step(self) -> None:
        until = time.perf_counter_ns() + STEP_US * 1000
        while time.perf_counter_ns() < until:
            pass
        now = time.perf_counter_ns()
        events: list[api.Event] = []
        for each in self.running:
            request = each.request
            token = (request.id + each.sent) % VOCABULARY
            each.sent += 1
            events.append(api.Chunk(request.id, [token], chr(token), [now]))
            if each.sent == request.max_new_tokens:
                stamps = (each.accepted_ns,) * 3
                events.append(api.Finish(request.id, "length", len(request.prompt), each.sent, *stamps))
        self.running = [each for each in self.running if each.sent < each.request.max_new_tokens]
        self.events.send(events)


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> PacedEngine:
    return PacedEngine(options)
