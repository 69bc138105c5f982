"""What is asked of an engine, what it says, and the methods by which both happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from overlap_bench.engines.api.records import RoundRecord
from overlap_bench.engines.errors import BadSetting

# ---------------------------------------------------------------------------------------------------------
# What is asked of an engine


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What both arms of a comparison share about the engine itself; toggles are kept apart. A field with a
    description is an option of the command line, which is its help, and the short help has those with
    {"first": True}; the others are set by key=value."""

    model: Annotated[
        str,
        Meta(
            description="A preset (micro-gpt2, echo-gpt2, tiny-gpt2, tiny-gpt2-32, tiny-llama, gpt2 or "
            "llama-1b: shapes with random weights), a local path or a hub id (tiny-gpt2; for vllm, "
            "tiny-gpt2-32).",
            extra={"first": True},
        ),
    ] = "tiny-gpt2"
    device: Annotated[str, Meta(description="auto, cuda or emulated (auto).", extra={"first": True})] = "auto"
    dtype: Annotated[
        str, Meta(description="float32, bfloat16 or float16 (float32).", extra={"first": True})
    ] = "float32"
    max_batch_size: Annotated[
        int, Meta(description="Requests decoded together (64).", extra={"first": True})
    ] = 64
    prefill_max_batch_size: Annotated[int, Meta(description="Requests prefilled together (64).")] = 64
    prefill_max_tokens: Annotated[int, Meta(description="Padded tokens of one prefill (2048).")] = 2048
    stream_interval: Annotated[int, Meta(description="Tokens per chunk after the first (8).")] = 8
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None  # KV blocks; None: as many as max_batch_size full contexts need
    sampling: bool = False  # whether requests may ask for a temperature: three times the captured programs
    scoring: bool = False  # whether requests may bring tokens to score: twice the captured programs
    prefix_cache: Annotated[bool, Meta(description="Keep and share the KV of equal prefixes (off).")] = False
    chunk_tokens: int = 128  # with chunk=on: padded tokens of prompts that one step takes
    max_context: int = 512  # tokens of one request, prompt and output together, at most
    seed: int = 0  # of the preset weights
    recorder: bool = True  # step records on or off
    staging: Annotated[
        str, Meta(description="Pageable copies of the emulated device: copy or sync (copy).")
    ] = "copy"
    pace: Annotated[
        str,
        Meta(
            description="How long the device's programs take: a profile (bench devices lists them), a "
            "FILE.toml of bench pace record, or 10ms, or decode=10ms+0.05ms*batch,prefill=80us*tokens; *k "
            "stretches it by this host's slowness (as long as they compute).",
            extra={"first": True},
        ),
    ] = ""
    blocking_sync: bool = False  # CUDA only: threads that wait for it sleep instead of spinning
    chaos: int | None = None  # seed of random delays on device and forward thread; None: no delays
    tokenize_workers: Annotated[
        int, Meta(description="Threads that tokenize, with --no-pretok; 0: the scheduler's own (0).")
    ] = 0
    plant_at: str | None = None  # where each step has a known delay: one of the engine's `plants`
    plant_ns: int = 0  # that delay; set by `--inject-delay`, never by hand

    def refuse_unused(self, engine: str, used: Sequence[str]) -> None:
        """BadSetting where an option was changed that the engine of that name ignores: the run's record would
        name it, and be a lie."""
        for option in msgspec.structs.fields(self):
            if option.name not in used and getattr(self, option.name) != option.default:
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


# What an engine stamps of a request, in the order in which it happens: fields of Finish, each -1 where an
# engine can't tell. To add one, add it here and, with a default of -1 and last, there: it is then recorded,
# checked and stored, and a metric may begin or end with it.
STAMPS = {
    "accepted_ns": "the engine took it in",
    "tokenized_ns": "the engine had its tokens",
    "queued_ns": "the scheduler had it in its queue",
    "admitted_ns": "it was scheduled for its first prefill",
}


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The end of one request; comes after its last chunk, once.

    Its STAMPS and `token_ns` are each -1 or in chronological order, after the request was sent and
    before this arrives. A request whose records break that, whose tokens are not `completion_tokens`, or that
    ends cancelled, which nobody asks for, counts as failed.

    sent_ns, submitted_ns and arrived_ns are for an engine that is itself the client of a server, as in Chunk:
    just before and just after the call that sent the request, and the arrival of the last byte.
    """

    id: int
    reason: str  # "length", "eos", "stop", "cancelled"
    prompt_tokens: int
    completion_tokens: int  # as many as its chunks held
    accepted_ns: int
    tokenized_ns: int
    admitted_ns: int
    scores: list[Score] = []  # of its forced tokens, in their order
    sent_ns: int = -1
    submitted_ns: int = -1
    arrived_ns: int = -1
    queued_ns: int = -1


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


DEVICE_KEYS = ("kind", "name")  # at least
MODEL_KEYS = ("name", "vocabulary", "context")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, once started."""

    engine: str
    versions: dict[str, str]
    device: dict[str, str]  # DEVICE_KEYS: "kind" is "cuda", "emulated" (", paced: NAME"), "cpu", "remote"
    # MODEL_KEYS; "tokenizer" (a tokenizer.json), "eos" (an id) if it has them; "largest_logit" (its absolute
    # value, after some tokens) if it scores: it tells how far apart the dtype spaces them.
    model: dict[str, str | int | float]
    toggles: dict[str, str]
    deterministic: bool  # equal prompts give equal greedy tokens, whatever the batch
    pids: dict[str, int]  # every process of the engine by role: "engine", "device", "output"
    takes_turns: bool = True  # False where its spec says so, and what was started can't after all


# ---------------------------------------------------------------------------------------------------------
# The protocol


class Engine:
    """An engine under measurement. Subclass, override, register an EngineSpec; about 100 lines.

    The host calls `start`, then `run` on its main thread; `submit`, `begin_round` and `collect` are only ever
    called from inside `pump`, so an engine that calls `pump` between two steps needs no lock.
    """

    wake_fd: int | None = None
    """A descriptor that turns readable when something other than a message is to be looked at, such as a
    result from a thread of the engine: a waiting `pump` then returns. Set by `start`, read by the engine."""

    def start(self, events: EventSink) -> Description:
        """Load everything, be ready for the first request. Raises BadSetting or EngineError."""
        raise NotImplementedError

    def preflight(self) -> str:
        """Raise BadSetting for what can't work here, as far as can be told without loading the model; return
        the kind of device it would run on, as its Description would say it. Called in place of `start`, in a
        process of its own, before any arm of a run boots; of an engine whose EngineSpec says `preflight`."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Take a request; must not block. A bad one is answered with an Error event."""
        raise NotImplementedError

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

    def drain(self) -> None:
        """Finish all that was begun: the step in flight, its output, what another process does for it.
        Another engine is about to have the machine for a few steps, and what is left undone would be done
        at its cost. Called inside `pump`, of an engine whose EngineSpec says `takes_turns`."""

    def begin_turns(self) -> None:
        """From now until `end_turns` at most one step may run between two calls of `pump`. For engines whose
        steps are another process's; others do so anyway."""

    def end_turns(self) -> None:
        """Requests may be left, and go on freely."""

    def delay(self, phase: str, ns: int) -> int:
        """From now on each step computes for `ns` more at the end of that phase, on the thread that runs it,
        and holds the interpreter meanwhile; 0: no more. What delays took since the last call, ns. Called
        between steps, of an engine whose EngineSpec names its `phases`; engines.delay.Delay does it."""
        raise BadSetting("this engine can't be delayed in a phase")

    def collect(self) -> RoundRecord:
        """What was recorded since begin_round or begin_profile. The engine is idle when this is called."""
        return RoundRecord()

    def stop(self) -> None:
        """End every process and thread of the engine; also after a `start` or `run` that failed. What takes
        longer than 5 seconds is killed."""
