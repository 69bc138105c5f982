"""The contract between an engine and whoever measures it.

Everything here is plain data or a protocol, and importing it costs milliseconds: an engine's host starts
under a foreign interpreter (another virtual environment, another vLLM), and must not drag a harness along.
All stamps are `time.perf_counter_ns()`, CLOCK_MONOTONIC on Linux: one clock for every process of a machine.

An engine of your own is a package with two things: a module that has an `EngineSpec` and the `Engine` it
builds, and the spec's place in its pyproject.toml,

    [project.entry-points."bench.engines"]
    yours = "your_module:SPEC"

Once that is installed beside `bench`, `bench engines` lists it and `bench run --engine yours` measures it. A
complete one, with a toggle, is examples/own_engine. What an engine can't tell (step records, counters, a
stamp that it does not have: -1) it leaves out, and the metrics made of that are absent, not zero.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec


class EngineError(Exception):
    """An engine cannot do what it was asked; the message is one line for the person who asked."""


class BadSetting(EngineError):
    """The request itself is wrong (a usage error): unknown toggle, impossible combination, long prompt."""


# ---------------------------------------------------------------------------------------------------------
# What is asked of an engine


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What both arms of a comparison share about the engine itself; toggles are kept apart."""

    model: str = "tiny-gpt2"
    device: str = "auto"  # "auto", "cuda" or "emulated"
    dtype: str = "float32"
    max_batch_size: int = 64  # requests decoded together, at most
    prefill_max_batch_size: int = 64  # requests prefilled together, at most
    prefill_max_tokens: int = 2048  # padded tokens of one prefill, at most
    stream_interval: int = 8  # tokens per chunk after the first token, which always goes out at once
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None  # KV blocks; None: as many as max_batch_size full contexts need
    sampling: bool = False  # whether requests may ask for a temperature: three times the captured programs
    scoring: bool = False  # whether requests may bring tokens to score: twice the captured programs
    prefix_cache: bool = False  # full KV blocks are kept and shared by requests that begin alike
    max_context: int = 512  # tokens of one request, prompt and output together, at most
    seed: int = 0  # of the preset weights
    recorder: bool = True  # step records on or off
    staging: str = "copy"  # emulated device only: what a pageable copy does first, "copy" or "sync"
    blocking_sync: bool = False  # CUDA only: threads that wait for it sleep instead of spinning
    chaos: int | None = None  # seed of random delays on device and forward thread; None: no delays
    tokenize_workers: int = 0  # threads that tokenize text prompts; 0: the scheduler's own thread does
    plant_at: str | None = None  # where each step has a known delay: one of the engine's `plants`
    plant_ns: int = 0  # that delay; set by `--plant`, never by hand

    def refuse_unheeded(self, engine: str, heeded: Sequence[str]) -> None:
        """BadSetting where an option was changed that the engine of that name ignores: the run's record would
        name it, and be a lie."""
        for option in msgspec.structs.fields(self):
            if option.name not in heeded and getattr(self, option.name) != option.default:
                raise BadSetting(f"engine {engine} has no {option.name}: leave it out")


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One generation request. `prompt` is text, or token ids where the client tokenized.

    Sampling: temperature, then the `top_k` most likely, then the most likely that hold `top_p` of what is
    left. The same `seed` gives the same tokens.
    """

    id: int
    prompt: str | list[int]
    max_new_tokens: int
    stop_on_eos: bool = False
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all
    seed: int = 0  # int64
    stop: list[str] = []  # the text ends before the first of these; the tokens with the one that completes it
    # These max_new_tokens tokens come, whatever the model would say; Finish tells their scores.
    forced: list[int] = []


# ---------------------------------------------------------------------------------------------------------
# What an engine says


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Some tokens of one request, as they are streamed.

    An engine that is itself the client of a server says when the chunk's last byte arrived at its socket, and
    how much later it read it: the records then hold `arrived_ns` in place of the load generator's own
    stamp, however long the way from there took.
    """

    id: int
    token_ids: list[int]
    text: str
    # When the engine had each token on the host: one per token, -1 where it can't tell. Once a chunk has
    # none, no later chunk of the request may have them.
    token_ns: list[int]
    tokens: int | None = None  # how many, where their ids are not known; -1: that is not known either
    arrived_ns: int = -1
    lag_ns: int = -1


class Score(msgspec.Struct, frozen=True, array_like=True):
    """What the model makes of a token that was forced upon it."""

    logprob: float  # natural logarithm of its probability, after all that came before it
    greedy: bool  # whether it is also the most likely token


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The end of one request; comes after its last chunk, once.

    Its stamps and `token_ns` are each -1 or in chronological order, after the request was sent and
    before this arrives. A request whose records break that, whose tokens are not `completion_tokens`, or that
    ends cancelled when nobody cancelled it, counts as failed.

    The last three are for an engine that is itself the client of a server, as in Chunk: just before and just
    after the call that sent the request, and the arrival of the last byte.
    """

    id: int
    reason: str  # "length", "eos", "stop", "cancelled"
    prompt_tokens: int
    completion_tokens: int  # as many as its chunks held
    accepted_ns: int  # the engine read the request
    tokenized_ns: int  # its prompt was token ids
    admitted_ns: int  # the scheduler gave it a place in a prefill
    scores: list[Score] = []  # of its forced tokens, in their order
    sent_ns: int = -1
    submitted_ns: int = -1
    arrived_ns: int = -1


class Error(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A request that the engine could not serve; nothing more comes for it."""

    id: int
    message: str


Event = Chunk | Finish | Error


class EventSink(Protocol):
    """Where an engine sends events. One call is one message; a batch per step is cheaper than one per event.

    `address` lets another process of the same engine (an output process) send to the same place, by a sink
    of its own (engines.host.Sink).
    """

    address: str

    def send(self, events: Sequence[Event]) -> None: ...


# The phases of a step on the host, in the order in which a step goes through them.
PHASES = (
    "recv",
    "schedule",
    "metadata",
    "h2d",
    "launch",
    "wait.launch_done",
    "wait.copy_done",
    "append",
    "output",
)
STEP_KINDS = ("prefill", "decode")
STEP_COLUMNS = (
    *("step", "kind", "batch", "tokens", "dropped", "preempted"),
    *(f"{phase}.{edge}" for phase in PHASES for edge in ("start", "end")),
)


class StepTable(msgspec.Struct, frozen=True):
    """Step records of one round as one int64 matrix, row-major; -1 means "did not happen".

    Columns, all of STEP_COLUMNS: "step", "kind" (index into STEP_KINDS), "batch" (requests), "tokens" (fed to
    the model), "dropped" (rows whose result was not wanted any more), "preempted" (requests that lost their
    blocks to others), and for each of PHASES the stamps "<phase>.start" and "<phase>.end". A round with
    impossible records (a step number twice, a phase that ends before it starts, stamps that are no
    perf_counter_ns of the round) fails the run.
    """

    columns: list[str]
    rows: int
    data: bytes


class DeviceWork(msgspec.Struct, frozen=True):
    """What the device did in one round, for busy time and copies: int64 rows (kind, step, start_ns, end_ns).

    kind: 0 program, 1 host-to-device copy, 2 device-to-host copy. Programs of one step that run side by side
    count once in its device time.
    """

    rows: int
    data: bytes


class HostRanges(msgspec.Struct, frozen=True, kw_only=True):
    """What the threads of one process did in a profiled round, one by one: int64 rows (thread, name, step,
    start_ns, end_ns), in the order in which they ended.

    thread is the kernel's id; name an index into `names`. On a thread, ranges nest or are disjoint.
    """

    role: str  # as in Description.pids
    pid: int
    threads: dict[int, str]
    names: list[str]
    rows: int
    data: bytes


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine recorded in addition, in a round that `begin_profile` began.

    `opened_ns` to `closed_ns` is what was marked as steady decode; -1 if never opened, or never closed.
    `streams` says on which stream of the device each kind of work runs, by "program", "h2d", "d2h".
    """

    opened_ns: int
    closed_ns: int
    hosts: list[HostRanges]
    streams: dict[str, str]


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All an engine recorded between begin_round and collect. Engines without step records leave it empty."""

    steps: StepTable | None = None
    device_work: DeviceWork | None = None
    counters: dict[str, int] = {}  # mechanism counters: what the toggles did in this round
    memory: dict[str, int] = {}  # bytes: "device_peak", "pinned_peak"
    profile: Profile | None = None


DEVICE_SAYS = ("kind", "name")  # at least
MODEL_SAYS = ("name", "vocabulary", "context")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, once started."""

    engine: str
    versions: dict[str, str]
    device: dict[str, str]  # DEVICE_SAYS: "kind" is "cuda", "emulated", "cpu" or "remote"
    # MODEL_SAYS; "tokenizer" (a tokenizer.json), "eos" (an id) if it has them; "largest_logit" (its absolute
    # value, after some tokens) if it scores: it tells how far apart the dtype spaces them.
    model: dict[str, str | int | float]
    toggles: dict[str, str]
    deterministic: bool  # equal prompts give equal greedy tokens, whatever the batch
    pids: dict[str, int]  # every process of the engine by role: "engine", "device", "output"


# ---------------------------------------------------------------------------------------------------------
# The protocol


class Engine:
    """An engine under measurement. Subclass, override, register an EngineSpec; about 100 lines.

    The host calls `start`, then `run` on its main thread; `submit`, `cancel`, `begin_round`, `collect` and
    `gauges` are only ever called from inside `pump`, so an engine that calls `pump` between two steps needs
    no lock.
    """

    wake_fd: int | None = None
    """A descriptor that turns readable when something other than a message is to be looked at, such as a
    result from a thread of the engine: a waiting `pump` then returns. Set by `start`, read by the engine."""

    def start(self, events: EventSink) -> Description:
        """Load everything, be ready for the first request. Raises BadSetting or EngineError."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Take a request; must not block. A bad one is answered with an Error event."""
        raise NotImplementedError

    def cancel(self, request: int) -> None:
        """Give up the request with that id: it ends with reason "cancelled", unless it has ended already. An
        engine that can't do that leaves it to its end."""

    def run(self, pump: Callable[[float | None], bool]) -> None:
        """Serve until `pump` returns False.

        `pump(timeout)` delivers every message that is waiting; where none is, it waits up to `timeout`
        seconds for one (0: not at all; None: for ever), or for `wake_fd`. An engine with a step loop of its
        own calls pump(0) in it; the default suits engines that work in threads or event loops of their own.
        """
        while pump(None):
            pass

    def begin_round(self) -> None:
        """Forget what was recorded so far."""

    def begin_profile(self, steps: int) -> None:
        """As begin_round, for a round in which every range of the host is kept, and a window of `steps` steps
        of steady decode is marked, for a profiler too. Raises BadSetting where it can't."""
        raise BadSetting("this engine has nothing to profile: it records no ranges")

    def collect(self) -> RoundRecord:
        """What was recorded since begin_round or begin_profile. The engine is idle when this is called."""
        return RoundRecord()

    def gauges(self) -> dict[str, int]:
        """What it holds right now, for whoever watches a server: "requests_running", "requests_waiting",
        "kv_blocks_used", "kv_blocks_free", as far as it can tell."""
        return {}

    def stop(self) -> None:
        """End every process and thread of the engine; also after a `start` or `run` that failed. What takes
        longer than 5 seconds is killed."""


# ---------------------------------------------------------------------------------------------------------
# Toggles: declarations only, so that a command line can list and check them without loading an engine

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Toggle:
    """One optimization: its named choices, the before first.

    `requires` says what combines: for a choice (or "*", the whole toggle) the choices of other toggles
    without which it means nothing.
    """

    name: str
    choices: tuple[str, ...]
    changes: str
    source: str
    requires: Mapping[str, Mapping[str, tuple[str, ...]]]
    counters: tuple[str, ...] = ()
    after: str = ""  # of `choices`, where the after is not the last of them

    @property
    def ends(self) -> tuple[str, str]:
        """Its before and its after."""
        return self.choices[0], self.after or self.choices[-1]

    def unmet(self, choice: str, settings: Settings) -> str | None:
        """Why `choice` means nothing under `settings`, or None where it means something."""
        for key in ("*", choice):
            for other, allowed in self.requires.get(key, {}).items():
                if settings.get(other) not in allowed:
                    subject = self.name if key == "*" else f"{self.name}={choice}"
                    there = f"{other}={settings[other]}" if other in settings else f"no {other} at all"
                    wanted = " or ".join(allowed)
                    return f"{subject} applies only with {other}={wanted}, not with {there}"
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """What else an engine is told, as free text, such as an address. It is given among the toggles of an
    arm. `default` "": it may be left out."""

    name: str
    says: str
    default: str = ""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How an engine is found (entry-point group `bench.engines`) before anything heavy is imported.

    `build` names "module:function", called in the host as build(options, toggles) -> Engine, under the
    interpreter of the arm.
    """

    name: str
    summary: str
    toggles: tuple[Toggle, ...]
    build: str
    needs: str = ""  # what must be installed, for `bench engines`
    plants: tuple[str, ...] = ()  # where it can delay each step by a known time: "device", "host"
    scores: bool = False  # whether EngineOptions.scoring means something to it
    samples: bool = False  # whether EngineOptions.sampling does; then `bench serve` asks for it
    settings: tuple[Setting, ...] = ()
    # This engine's own defaults for EngineOptions, where they differ.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    asks_text: bool = False  # prompts go to it as text unless --pretok is asked: it may name no tokenizer
    # Whether it sizes itself by the memory that it finds free. It would count as its own what starts
    # beside it, and two arms would get caches of two sizes (vLLM issue 55827); so one starts after the other.
    starts_alone: bool = False

    def toggle(self, name: str) -> Toggle:
        """The toggle of that name; BadSetting offers the nearest one."""
        toggle: Toggle = pick(name, {toggle.name: toggle for toggle in self.toggles}, "toggle")
        return toggle

    def setting(self, name: str) -> Setting | None:
        """The setting of that name, if it is one."""
        return next((setting for setting in self.settings if setting.name == name), None)

    def check(self, settings: Settings) -> dict[str, str]:
        """Full, valid settings from partial ones: toggles that mean something and were left out get their
        first choice that means something. Raises BadSetting with the reason."""
        for name, choice in settings.items():
            if self.setting(name) is None:
                toggle = self.toggle(name)
                pick(choice, {each: each for each in toggle.choices}, f"choice of {name}")
        full = dict(settings)
        for toggle in self.toggles:  # in the order of declaration: later ones may depend on earlier ones
            if toggle.name in full:
                continue
            possible = [choice for choice in toggle.choices if toggle.unmet(choice, full) is None]
            if possible:
                full[toggle.name] = possible[0]
        for setting in self.settings:
            if setting.default:
                full.setdefault(setting.name, setting.default)
        for name, choice in full.items():
            reason = None if self.setting(name) else self.toggle(name).unmet(choice, full)
            if reason is not None:
                raise BadSetting(reason)
        return full

    def every_setting(self) -> list[dict[str, str]]:
        """Every full setting that means something."""
        partial: list[dict[str, str]] = [{}]
        for toggle in self.toggles:
            grown = []
            for settings in partial:
                possible = [choice for choice in toggle.choices if toggle.unmet(choice, settings) is None]
                grown += [settings | {toggle.name: choice} for choice in possible] or [settings]
            partial = grown
        return partial


def pick(name: str, among: Mapping[str, Any], what: str) -> Any:
    """`among[name]`, or a BadSetting that offers the names that begin with it, or the nearest one."""
    if name in among:
        return among[name]
    from difflib import get_close_matches

    near = [each for each in among if name and each.startswith(name)]
    near = near or get_close_matches(name, among, n=1, cutoff=0.5)
    offer = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
    hint = f"; did you mean {offer}?" if near else f"; available: {', '.join(among)}"
    raise BadSetting(f"unknown {what} '{name}'{hint}")


def find_engines() -> dict[str, EngineSpec]:
    """Every installed engine by name. One that can't be loaded, and a name that two modules claim, are left
    out with one warning, not an error: they may have no part in what is asked."""
    found: dict[str, EngineSpec] = {}
    entries = entry_points(group="bench.engines")
    for name in sorted(entries.names):
        entry, *others = {each.value: each for each in entries.select(name=name)}.values()
        if others:
            claims = " and ".join(sorted(each.value for each in (entry, *others)))
            _tell_once(f"engine {name} is left out: {claims} claim the name")
            continue
        try:
            spec = entry.load()
            if not isinstance(spec, EngineSpec):
                raise TypeError(f"{entry.value} is not an EngineSpec but of type {type(spec).__name__}")
            if spec.name != entry.name:
                raise ValueError(f"{entry.value} calls itself {spec.name}; one name for both, please")
        except Exception as error:  # whatever a third party's module does when it is imported
            package = f" of {entry.dist.name}" if entry.dist is not None else ""
            _tell_once(f"engine {entry.name}{package} can't be loaded: {type(error).__name__}: {error}")
        else:
            found[entry.name] = spec
    return found


@cache
def _tell_once(line: str) -> None:
    sys.stderr.write(f"bench: {line}\n")


# ---------------------------------------------------------------------------------------------------------
# Records that cross the process border: harness <-> host


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All a host needs; passed as one JSON argument: `python -m engines.host CONFIG`.

    Addresses are ZeroMQ endpoints. The host binds `inbox` (PULL) and connects `replies` and `events` (PUSH).
    """

    name: str  # the arm, for messages: "before", "after"
    build: str  # EngineSpec.build: another interpreter need not have the engine's entry point installed
    options: EngineOptions
    toggles: dict[str, str]
    inbox: str
    replies: str
    events: str
    parent: int = msgspec.field(default_factory=os.getpid)  # whoever made the config; the host dies with it


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    request: Request


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    id: int


class BeginRound(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    pass


class BeginProfile(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    steps: int


class Collect(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    pass


class ReadGauges(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    pass


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    pass


ToHost = Submit | Cancel | BeginRound | BeginProfile | Collect | ReadGauges | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    name: str
    description: Description
    origin: str = ""  # the file that the engine's code was found in


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """BeginRound or BeginProfile was carried out: the round's requests may be sent."""

    name: str


class Collected(msgspec.Struct, frozen=True, tag="collected"):
    name: str
    record: RoundRecord


class Gauges(msgspec.Struct, frozen=True, tag="gauges"):
    name: str
    values: dict[str, int]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The host stops its engine now, and ends. `usage`: what was asked is wrong (exit 2), else it broke
    (exit 4)."""

    name: str
    message: str
    usage: bool
    traceback: str = ""
    died: list[int] = []  # of Description.pids, what had ended before the engine was stopped


FromHost = Ready | Begun | Collected | Gauges | Failed
