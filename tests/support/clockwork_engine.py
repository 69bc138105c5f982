"""A third party's engine: it emits a token per request on every tick of a clock, and computes nothing.

It lives outside the packages, and is found as any third party's would be: by the entry point of a
distribution on the path (`installed` in tests/support/clockwork.py writes one). About what an adapter takes.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from overlap_bench.engines import api

PACE_S = {"slow": 0.002, "fast": 0.001}

SPEC = api.EngineSpec(
    name="clockwork",
    summary="tokens on a timer, for tests of the harness",
    toggles=(
        api.Toggle("pace", ("slow", "fast"), "time between two tokens", "tests", {}),
        api.Toggle("tokens", ("counted", "shifted"), "which tokens come out", "tests", {}),
        api.Toggle(
            "boot", ("works", "breaks", "refuses", "lacks", "hangs"), "whether it starts", "tests", {}
        ),
        api.Toggle("service", ("all", "none"), "whether it serves requests", "tests", {}),
    ),
    build="clockwork_engine:build",
    settings=(api.Setting("tokenizer", "tokenizer.json of its prompts"),),
)


@dataclass(slots=True)
class Running:
    request: api.Request
    accepted_ns: int
    sent: int = 0


@dataclass(slots=True)
class Clockwork(api.Engine):
    options: api.EngineOptions
    toggles: Mapping[str, str]
    running: list[Running] = field(default_factory=list)
    ticks: int = 0

    def start(self, events: api.EventSink) -> api.Description:
        if self.toggles["boot"] == "breaks":
            raise api.EngineError("the mainspring is broken")
        if self.toggles["boot"] == "refuses":
            raise api.BadSetting("it wants to be wound up first")
        if self.toggles["boot"] == "lacks":
            import mainspring  # noqa: F401
        if self.toggles["boot"] == "hangs":
            time.sleep(1000)
        self.events = events
        # A process to watch, as a device process is; the arms' differ, so that a test can tell them apart.
        seconds = {"slow": "1001", "fast": "1002"}[self.toggles["pace"]]
        self.device = subprocess.Popen(["sleep", seconds])
        return api.Description(
            engine="clockwork",
            versions={"clockwork": "1"},
            device={"kind": "cpu", "name": "a clock"},
            model={
                "name": "none",
                "vocabulary": 256,
                "context": self.options.max_context,
                **({"tokenizer": self.toggles["tokenizer"]} if "tokenizer" in self.toggles else {}),
            },
            toggles=dict(self.toggles),
            deterministic=True,
            pids={"engine": os.getpid(), "device": self.device.pid},
        )

    def submit(self, request: api.Request) -> None:
        if self.toggles["service"] == "none":
            self.events.send([api.Error(request.id, "out of order")])
        else:
            self.running.append(Running(request, time.perf_counter_ns()))

    def run(self, pump: Callable[[float | None], bool]) -> None:
        due = time.monotonic()
        while pump(max(0.0, due - time.monotonic()) if self.running else None):
            if self.running and time.monotonic() >= due:
                self.tick()
                due = time.monotonic() + PACE_S[self.toggles["pace"]]

    def tick(self) -> None:
        self.ticks += 1
        now = time.perf_counter_ns()
        events: list[api.Event] = []
        shift = 1 if self.toggles["tokens"] == "shifted" else 0
        for each in self.running:
            request = each.request
            token = (request.id + each.sent + shift) % 256
            each.sent += 1
            events.append(api.Chunk(request.id, [token], chr(token), [now]))
            if each.sent == request.max_new_tokens:
                stamps = (each.accepted_ns,) * 3
                events.append(api.Finish(request.id, "length", len(request.prompt), each.sent, *stamps))
        self.running = [each for each in self.running if each.sent < each.request.max_new_tokens]
        self.events.send(events)

    def begin_round(self) -> None:
        self.ticks = 0

    def collect(self) -> api.RoundRecord:
        return api.RoundRecord(counters={"ticks": self.ticks}, memory={"device_peak": 0})

    def stop(self) -> None:
        if hasattr(self, "device"):
            self.device.kill()
            self.device.wait()


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> Clockwork:
    return Clockwork(options, toggles)
