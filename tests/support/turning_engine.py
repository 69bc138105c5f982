"""The example's engine, which takes turns, with what one may do badly in them."""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import paced_engine

from overlap_bench.engines import api, baton

paced_engine.STEP_US, paced_engine.WRITE_US = 1000, 0
SPEC = replace(
    paced_engine.SPEC,
    name="turning",
    toggles=(
        paced_engine.OUTPUT,
        api.Toggle("turn", ("ends", "hangs", "computes"), "what it does with its turns", "tests", {}),
        api.Toggle("patience", ("long", "short"), "how long it waits for the baton", "tests", {}),
    ),
    build="turning_engine:build",
)


class Turning(paced_engine.PacedEngine):
    def start(self, events: api.EventSink) -> api.Description:
        if self.toggles["patience"] == "short":
            baton.PATIENCE_S = 0.5
        if self.toggles["turn"] == "computes":
            threading.Thread(target=compute, daemon=True).start()
        return super().start(events)

    def step(self) -> None:
        if self.toggles["turn"] == "hangs" and self.steps == 5:
            time.sleep(1000)
        super().step()


def compute() -> None:
    while True:
        sum(range(1000))


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> Turning:
    return Turning(options, toggles)
