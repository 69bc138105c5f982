"""The clockwork engine with one thing wrong: each choice of `breaks` is a way not to keep to the contract."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from overlap_bench.engines import api
from tests.support import clockwork_engine
from tests.support.clockwork_engine import Clockwork

BREAKS = (
    "nothing",
    "finishes twice",
    "chunks for nobody",
    "ids of text",
    "describes nothing",
    "describes no context",
    "counts in halves",
    "starts half",
    "starts half and hangs",
    "can not stop again",
    "does not stop",
    "returns early",
    "hangs between rounds",
    "loses a token",
    "ends before it starts",
)

SPEC = api.EngineSpec(
    name="broken",
    summary="a clock with one thing wrong",
    toggles=(
        *clockwork_engine.SPEC.toggles,
        api.Toggle("breaks", BREAKS, "what is wrong with it", "tests", {}),
    ),
    build="tests.support.broken_engine:build",
)


@dataclass(slots=True)
class Sink:
    """What the engine sends, with what is wrong with it."""

    sink: api.EventSink
    breaks: str

    def send(self, events: list[api.Event]) -> None:
        self.sink.send([wrong for event in events for wrong in self.wrong(event)])

    def wrong(self, event: api.Event) -> list[api.Event]:
        match self.breaks, event:
            case "finishes twice", api.Finish():
                return [event, event]
            case "chunks for nobody", api.Chunk():
                return [event, api.Chunk(987654, event.token_ids, event.text, event.token_ns)]
            case "ids of text", api.Chunk():
                return [api.Chunk(event.id, ["a"], event.text, event.token_ns)]  # type: ignore[list-item]
            case "loses a token", api.Finish():
                return [msgspec.structs.replace(event, completion_tokens=event.completion_tokens + 1)]
        return [event]


@dataclass(slots=True)
class Broken(Clockwork):
    def start(self, events: api.EventSink) -> api.Description:
        breaks = self.toggles["breaks"]
        if breaks.startswith("starts half"):
            raise ValueError("no hands\nand no feet")
        said = Clockwork.start(self, Sink(events, breaks))  # type: ignore[arg-type]
        if breaks == "describes nothing":
            return None  # type: ignore[return-value]
        if breaks == "describes no context":
            del said.model["context"]
        return said

    def run(self, pump: Callable[[float | None], bool]) -> None:
        if self.toggles["breaks"] != "returns early":
            Clockwork.run(self, pump)

    def stop(self) -> None:
        if self.toggles["breaks"] == "starts half":
            raise AttributeError("what start did not make")
        if self.toggles["breaks"] == "starts half and hangs":
            time.sleep(600)
        Clockwork.stop(self)
        if self.toggles["breaks"] == "does not stop":
            time.sleep(600)
        if self.toggles["breaks"] == "can not stop again":
            stopped = Path("stopped-once")
            if stopped.exists():
                raise ValueError("the spring is stuck")
            stopped.touch()

    def collect(self) -> api.RoundRecord:
        breaks = self.toggles["breaks"]
        if breaks == "hangs between rounds":
            time.sleep(60)
        if breaks == "counts in halves":
            return api.RoundRecord(counters={"ticks": 0.5})  # type: ignore[dict-item]
        record = Clockwork.collect(self)
        if breaks == "ends before it starts":
            now = time.perf_counter_ns()
            values = dict.fromkeys(api.STEP_COLUMNS, -1) | {"step": 1, "kind": 1, "batch": 1}
            values |= {"launch.start": now, "launch.end": now - 1000}
            data = np.array(list(values.values()), dtype=np.int64).tobytes()
            return msgspec.structs.replace(record, steps=api.StepTable(list(values), 1, data))
        return record


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> Broken:
    return Broken(options, toggles)
