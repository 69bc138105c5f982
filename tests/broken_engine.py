"""The clockwork engine with one thing wrong: each choice of `breaks` is a way not to keep to the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines import api
from tests import clockwork_engine
from tests.clockwork_engine import Clockwork

BREAKS = (
    "nothing",
    "finishes twice",
    "chunks for nobody",
    "ids of text",
    "describes nothing",
    "describes no context",
    "counts in halves",
)

SPEC = api.EngineSpec(
    name="broken",
    summary="a clock with one thing wrong",
    toggles=(
        *clockwork_engine.SPEC.toggles,
        api.Toggle("breaks", BREAKS, "what is wrong with it", "tests", {}),
    ),
    build="tests.broken_engine:build",
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
        return [event]


@dataclass(slots=True)
class Broken(Clockwork):
    def start(self, events: api.EventSink) -> api.Description:
        breaks = self.toggles["breaks"]
        said = Clockwork.start(self, Sink(events, breaks))  # type: ignore[arg-type]
        if breaks == "describes nothing":
            return None  # type: ignore[return-value]
        if breaks == "describes no context":
            del said.model["context"]
        return said

    def collect(self) -> api.RoundRecord:
        if self.toggles["breaks"] == "counts in halves":
            return api.RoundRecord(counters={"ticks": 0.5})  # type: ignore[dict-item]
        return Clockwork.collect(self)


def build(options: api.EngineOptions, toggles: Mapping[str, str]) -> Broken:
    return Broken(options, toggles)
