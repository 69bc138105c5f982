"""What an SGLang gives on a clock, as JSON: run by the interpreter that has it.

python -m tests.support.small_sglang PACKAGE TOGGLE=CHOICE ...
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from overlap_bench.engines import api

PACE = "decode=1ms,prefill=1ms+1us*tokens,launch=2us,replay=20us,copy=2us,wake=5us"
PROMPTS = [[10 + row, *range(40, 44 + 3 * row)] for row in range(8)]
TOKENS = 24
DELAY_NS = 200_000


class Sink:
    address = ""

    def __init__(self) -> None:
        self.events: list[api.Event] = []

    def send(self, events: Sequence[api.Event]) -> None:
        self.events += events

    def take(self) -> dict[int, dict[str, Any]]:
        """What was said since, by request."""
        said: dict[int, dict[str, Any]] = {}
        for each in self.events:
            row = said.setdefault(each.id, {"ids": [], "text": "", "reason": ""})
            if isinstance(each, api.Chunk):
                assert not row["reason"]
                row["ids"] += each.token_ids
                row["text"] += each.text
            elif isinstance(each, api.Finish):
                assert each.completion_tokens == len(row["ids"])
                row["reason"] = each.reason
            else:
                row["reason"] = each.message
        self.events = []
        return said


class Round:
    """Requests that are asked for at once; `drain`: after so many steps, again and again; `delayed`: the
    phase that each step spends longer in."""

    def __init__(self, requests: list[api.Request], drain: int = 0, delayed: str = "") -> None:
        self.requests, self.drain, self.delayed = requests, drain, delayed


class Script:
    """The host's pump: one round after the other."""

    def __init__(self, engine: api.Engine, sink: Sink, rounds: dict[str, Round]) -> None:
        self.engine, self.sink, self.rounds = engine, sink, rounds
        self.left = list(rounds)
        self.now = ""
        self.steps = 0
        self.said: dict[str, Any] = {}
        self.records: dict[str, Any] = {}
        self.spent: dict[str, int] = {}  # by delayed phase, ns

    def pump(self, timeout: float | None) -> bool:
        if timeout == 0:
            self.steps += 1
            now = self.rounds[self.now]
            if now.drain and self.steps % now.drain == 0:
                self.engine.drain()
            return True
        if self.now:
            self.said[self.now] = self.sink.take()
            self.records[self.now] = steps_of(self.engine.collect())
            if phase := self.rounds[self.now].delayed:
                self.spent[phase] = self.engine.delay("", 0)
        if not self.left:
            return False
        self.now, self.steps = self.left.pop(0), 0
        self.engine.begin_round()
        if phase := self.rounds[self.now].delayed:
            self.engine.delay(phase, DELAY_NS)
        for each in self.rounds[self.now].requests:
            self.engine.submit(each)
        return True


def steps_of(record: api.RoundRecord) -> list[dict[str, int]]:
    assert record.steps is not None
    columns = record.steps.columns
    values = memoryview(record.steps.data).cast("q").tolist()
    return [
        dict(zip(columns, values[at : at + len(columns)], strict=True))
        for at in range(0, len(values), len(columns))
    ]


def delays(script: Script) -> dict[str, tuple[int, int, int]]:
    """By phase: the ns that delays took, how long it was at least, and how many steps there were."""
    found = {}
    for phase, spent in script.spent.items():
        steps = script.records[phase]
        least = min(step[f"{phase}.end"] - step[f"{phase}.start"] for step in steps)
        found[phase] = (spent, least, len(steps))
    return found


def break_off(package: str, engine: api.Engine, script: Script) -> str:
    """What ends a round in which a step comes to a package that isn't there."""
    model = import_module(f"{package}.worker").Model
    model.forward = lambda *given, **named: import_module("vllm.ops")
    try:
        engine.run(script.pump)
    except api.EngineError as error:
        return str(error)
    return ""


def main() -> None:
    package = f"overlap_bench.engines.{sys.argv[1]}"
    spec = import_module(package).SPEC
    toggles = dict(each.split("=") for each in sys.argv[2:])
    cached = toggles.pop("prefix_cache", "off") == "on"
    options = api.EngineOptions(
        model="tiny-llama", pace=PACE, max_batch_size=16, max_context=256, stream_interval=1,
        prefill_max_tokens=64, num_blocks=32, prefix_cache=cached,
    )  # fmt: skip
    engine, sink = import_module(f"{package}.engine").build(options, toggles), Sink()
    described = engine.start(sink)
    frozen = gc.get_freeze_count()
    together = [api.Request(row, prompt, TOKENS) for row, prompt in enumerate(PROMPTS)]
    alone = [api.Request(3, PROMPTS[3], TOKENS)]
    rounds = {
        "together": Round(together),
        "again": Round(together),
        "turns": Round(together, drain=4),
        "each": Round(together, drain=1),
        "alone": Round(alone),
        "long": Round([api.Request(0, list(range(50, 200)), 8)], drain=2),  # its prompt in parts
        "ended": Round([api.Request(row, [row + 3], 200, stop_on_eos=True) for row in range(8)]),
        # Of 512 slots. SGLang lets in more than fits where answers may end early.
        "crowd": Round(
            [api.Request(row, prompt, 150, stop_on_eos=True) for row, prompt in enumerate(PROMPTS)], drain=5
        ),
        "calm": Round([api.Request(3, PROMPTS[3], 150, stop_on_eos=True)]),
        "refused": Round([api.Request(0, list(range(200)), 100), api.Request(1, [], 4), *alone]),
        "none": Round([api.Request(0, PROMPTS[0], 1)]),
    }
    script = Script(engine, sink, rounds)
    engine.run(script.pump)
    whole = script.said["together"][3]["text"]
    rounds = {"stopped": Round([api.Request(3, PROMPTS[3], TOKENS, stop=[whole[12:16]])])}
    last = Script(engine, sink, rounds)
    engine.run(last.pump)
    delayed = Script(engine, sink, {phase: Round(alone, delayed=phase) for phase in spec.phases})
    engine.run(delayed.pump)
    broken = break_off(package, engine, Script(engine, sink, {"broken": Round(alone)}))
    engine.stop()
    print(
        json.dumps(
            {
                "device": described.device,
                "frozen": frozen,
                "toggles": described.toggles,
                "said": script.said | last.said,
                "steps": script.records | last.records,
                "delayed": delays(delayed),
                "counts": {kind: each.of_a_step() for kind, each in engine._card.counts.items()},  # type: ignore[attr-defined]
                "stop": whole[12:16],
                "broken": broken,
            }
        )
    )


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # SGLang's forward thread has no end
