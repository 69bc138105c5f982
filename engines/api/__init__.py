"""What an engine and whoever measures it have in common; `overlap_bench` has all of its names. To add an
engine, read in this order:

- contract: `Engine`, the class to derive from, with the `Request`s that it gets, the events that it sends
  (`Chunk`, `Finish`, `Error`) and its `Description`
- toggles: `Toggle` and `Setting`, what can be switched and set about it
- registry: `EngineSpec`, which names all that before anything heavy is imported; `find_engines`
- records: `RoundRecord`, what it may record besides; each part is optional
- wire: the messages between harness and host, which no engine sees

Beside this folder, as they import nothing of it: ../errors (`EngineError`, it broke; `BadSetting`, what was
asked is wrong; `BadFile`, a file is) and ../pace, how long the programs of a device of known speed take,
which only who has such a device needs.

An engine of your own is a package with two things: a module that has an `EngineSpec` and the `Engine` it
builds, and the spec's place in its pyproject.toml,

    [project.entry-points."bench.engines"]
    yours = "your_module:SPEC"

Once that is installed beside `bench`, `bench engines` lists it and `bench run --engine yours` measures it. A
complete one, with a toggle, is examples/own_engine. Where arms take turns every few steps, small changes
show in a minute on a noisy machine (harness/stats/stats.md, "Turns"): say `takes_turns` in the spec, call
pump(0) once between two steps, and write `drain`. `bench sensitivity` shows what a microsecond in each part
of a step costs: name its `phases` in the spec, hand `delay` on to a `Delay`, and `spend` it at the end of
each. What an engine can't tell (step records, counters, a stamp
that it does not have: -1) it leaves out, and the metrics made of that are absent, not zero.

All stamps are `time.perf_counter_ns()`, CLOCK_MONOTONIC on Linux: one clock for every process of a machine.
Everything here is plain data or a protocol, and importing it costs milliseconds: an engine's host starts
under a foreign interpreter (another virtual environment, another vLLM), and must not drag a harness along.
"""

from __future__ import annotations

from overlap_bench.engines.api.contract import (
    DEVICE_KEYS,
    MODEL_KEYS,
    STAMPS,
    Chunk,
    Description,
    Engine,
    EngineOptions,
    Error,
    Event,
    EventSink,
    Finish,
    Request,
    Score,
)
from overlap_bench.engines.api.records import (
    PHASES,
    STEP_COLUMNS,
    STEP_KINDS,
    TURN_COLUMNS,
    DeviceWork,
    HostRanges,
    Profile,
    RoundRecord,
    StepTable,
    TurnTable,
)
from overlap_bench.engines.api.registry import EngineSpec, check_preset, find_engines, pick
from overlap_bench.engines.api.toggles import Setting, Settings, Toggle
from overlap_bench.engines.api.wire import (
    BeginProfile,
    BeginRound,
    BeginTurns,
    Begun,
    Collect,
    Collected,
    EndTurns,
    Failed,
    FromHost,
    HostConfig,
    Parked,
    Ready,
    Stop,
    Submit,
    ToHost,
    Waiting,
)
from overlap_bench.engines.delay import Delay
from overlap_bench.engines.errors import BadFile, BadSetting, EngineError, first_line
from overlap_bench.engines.pace import Ledger, PaceProfile, host_k, make_pace, profiles, settle

__all__ = [
    "DEVICE_KEYS",
    "MODEL_KEYS",
    "PHASES",
    "STAMPS",
    "STEP_COLUMNS",
    "STEP_KINDS",
    "TURN_COLUMNS",
    "BadFile",
    "BadSetting",
    "BeginProfile",
    "BeginRound",
    "BeginTurns",
    "Begun",
    "Chunk",
    "Collect",
    "Collected",
    "Delay",
    "Description",
    "DeviceWork",
    "EndTurns",
    "Engine",
    "EngineError",
    "EngineOptions",
    "EngineSpec",
    "Error",
    "Event",
    "EventSink",
    "Failed",
    "Finish",
    "FromHost",
    "HostConfig",
    "HostRanges",
    "Ledger",
    "PaceProfile",
    "Parked",
    "Profile",
    "Ready",
    "Request",
    "RoundRecord",
    "Score",
    "Setting",
    "Settings",
    "StepTable",
    "Stop",
    "Submit",
    "ToHost",
    "Toggle",
    "TurnTable",
    "Waiting",
    "check_preset",
    "find_engines",
    "first_line",
    "host_k",
    "make_pace",
    "pick",
    "profiles",
    "settle",
]
