"""What is asked of an engine, and when: plain data, made from a few options and a seed."""

from __future__ import annotations

import math
from hashlib import blake2b

import msgspec

from engines.api import BadSetting, pick
from harness.workload import lengths, traces
from harness.workload import prompts as source
from harness.workload.arrivals import ARRIVALS, SCHEDULES, TIMING_OPTIONS, UNTIMED, parse_ramp
from harness.workload.asking import Prompt, ask, different
from harness.workload.conversations import is_conversations
from harness.workload.streams import stream

__all__ = ["UNTIMED", "Planned", "Workload", "plan", "skipped"]

AT_LEAST_1 = ("num_requests", "concurrency", "prompt_repeats")
ABOVE_0 = ("interval_ms", "rate", "burstiness", "trace_scale")
# What a trace says itself, or has not got.
NOT_WITH_TRACE = ("prompts", "prompt_repeats", "unique_prompts", "input_tokens", "max_new_tokens")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The workload options of the command line, by the same names."""

    prompt: str | None = "Hello"  # what every request asks, where `prompts` is not given
    # A file of one prompt per line, a ShareGPT file (.json), or "english": from Python's documentation.
    prompts: str | None = None
    prompt_repeats: int | None = None  # each prompt is asked so often; None: as often as its turn comes
    unique_prompts: bool = False  # each prompt opens with a token of its own: no prefix is shared
    # Both are lengths (lengths.py): a number, or a distribution to draw from. Prompts are joined and cut.
    input_tokens: int | str | None = None  # None: prompts as they are
    max_new_tokens: int | str | None = 128  # None: as long as the trace, or the answers of ShareGPT, say
    num_requests: int = 64  # of a trace: at most
    arrival: str = "fixed"  # one of ARRIVALS
    interval_ms: float = 20.0  # arrival=fixed
    arrival_schedule: str = "absolute"  # arrival=fixed: "absolute" or "relative"
    rate: float | None = None  # arrival=poisson and gamma: requests per second; trace: stretched to it
    burstiness: float = 1.0  # arrival=gamma: shape; 1 is a Poisson process, less comes in bursts
    ramp_up: str | None = None  # arrival=poisson and gamma: "START[:REQUESTS]", a rate that grows to `rate`
    trace: str | None = None  # arrival=trace: Mooncake or BurstGPT
    trace_scale: float = 1.0  # arrival=trace: every length times this
    concurrency: int | None = None  # arrival=closed: requests in flight
    pretok: bool = True  # prompts are sent as token ids: the engine's own tokenizing is not measured
    stop_on_eos: bool = False
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # sample from so many of the most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely that together have this probability; 1: from all
    stop: list[str] = []  # texts that end a request once its output has one

    @property
    def interval_ns(self) -> int:
        return round(self.interval_ms * 1e6)

    @property
    def most_new_tokens(self) -> int | None:
        """The longest output that can be asked for; None where the data says."""
        if self.max_new_tokens is None:
            return None
        return lengths.parse(self.max_new_tokens, "max_new_tokens").most

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it is made of."""
        prompts = None if self.prompts == source.ENGLISH else self.prompts
        return tuple(path for path in (prompts, self.trace) if path is not None)

    @property
    def open_loop(self) -> bool:
        """Whether requests are spread over time, whatever the engine does."""
        return ARRIVALS[self.arrival].open_loop

    def check(self) -> None:
        """Raises BadSetting, one line, where this is no workload."""
        for name in AT_LEAST_1:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise BadSetting(f"{name} must be at least 1, not {count}")
        for name in ABOVE_0:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadSetting(f"{name} must be above 0, not {value:g}")
        for name in ("input_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None:
                lengths.parse(value, name)
        self._check_timing()
        self._check_sampling()
        if "" in self.stop:
            raise BadSetting("a stop string is empty: it would end every request at once")
        if self.arrival == "trace":
            self._check_trace()
        else:
            self._check_prompts()

    def _check_sampling(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadSetting(f"temperature must be 0 (greedy) or above, not {self.temperature:g}")
        if self.top_k < 0:
            raise BadSetting(f"top_k must be 0 (all) or above, not {self.top_k}")
        if self.top_k >= 1 << 31:
            raise BadSetting(f"top_k must fit into 32 bits, not be {self.top_k}; 0 samples from all")
        if not 0 < self.top_p <= 1:
            raise BadSetting(f"top_p must be above 0 and at most 1 (all), not {self.top_p:g}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1):
            raise BadSetting("top_k and top_p apply only with a temperature above 0")

    def _check_timing(self) -> None:
        """An option that the arrival does not look at would silently change nothing, so it is refused."""
        pick(self.arrival_schedule, {schedule: schedule for schedule in SCHEDULES}, "arrival_schedule")
        arrival = pick(self.arrival, ARRIVALS, "arrival")
        for name in TIMING_OPTIONS:
            if name not in arrival.options and getattr(self, name) != getattr(DEFAULT, name):
                fitting = " or ".join(each for each, other in ARRIVALS.items() if name in other.options)
                raise BadSetting(f"{name} applies only with arrival={fitting}, not {self.arrival}")
        for name in arrival.needs:
            if getattr(self, name) is None:
                raise BadSetting(f"arrival={self.arrival} needs a {name}")
        if self.ramp_up is not None:
            _, requests = parse_ramp(self.ramp_up)
            if requests is not None and requests > self.num_requests:
                raise BadSetting(f"ramp_up={self.ramp_up} is longer than num_requests={self.num_requests}")

    def _check_prompts(self) -> None:
        if self.prompts is not None and self.prompt not in (None, DEFAULT.prompt):
            raise BadSetting("prompt and prompts exclude each other: give one of them")
        if self.prompt_repeats is not None and self.prompt_repeats > self.num_requests:
            raise BadSetting(
                f"prompt_repeats={self.prompt_repeats} is more than num_requests={self.num_requests}"
            )
        if self.max_new_tokens is None and not (is_conversations(self.prompts) and self.input_tokens is None):
            raise BadSetting("max_new_tokens is needed: only a trace, or whole ShareGPT prompts, go without")
        different(self, len(source.texts(self.prompt, self.prompts, stream(0, "prompts"))))

    def _check_trace(self) -> None:
        assert self.trace is not None
        for name in NOT_WITH_TRACE:
            if getattr(self, name) not in (None, False):
                raise BadSetting(f"{name} does not apply to a trace, which says how long each request is")
        if self.prompt not in (None, DEFAULT.prompt):
            raise BadSetting("prompt does not apply to a trace, whose prompts are random tokens")
        if not self.pretok:
            raise BadSetting("a trace has no text, only numbers of tokens: it needs pretok")
        entries = traces.read(self.trace, self.num_requests).entries
        if self.rate is not None and entries[0].at_ms == entries[-1].at_ms:
            raise BadSetting(f"rate does not apply here: all {len(entries)} of the trace come at once")


DEFAULT = Workload()


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """One request of a round, and when it is due: `offset_ns` after the round's start, or UNTIMED (-1)."""

    id: int
    offset_ns: int
    prompt: Prompt
    max_new_tokens: int
    stop_on_eos: bool
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of its samples
    stop: list[str] = []


def plan(workload: Workload, seed: int, tokenizer_path: str, context: int) -> list[Planned]:
    """The requests of one round, in the order in which they are sent; the same for the same arguments.

    `workload` is a checked one. Requests take the prompts in turn, from the start again when there are too
    few. `tokenizer_path` names a tokenizer.json and may be empty where nothing needs one (text as it is).
    Prompt and output together must fit `context` tokens; without a tokenizer that is left to the engine.
    Arrivals, lengths and prompts each have random numbers of their own. Raises BadSetting.
    """
    asked = ask(workload, seed, tokenizer_path, context).requests
    offsets = ARRIVALS[workload.arrival].offsets(workload, stream(seed, "arrivals"))
    return [
        Planned(
            id=index,
            offset_ns=offset,
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            stop_on_eos=workload.stop_on_eos,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=request_seed(seed, index),
            stop=workload.stop,
        )
        for index, (offset, (prompt, max_new_tokens)) in enumerate(zip(offsets, asked, strict=True))
    ]


def skipped(workload: Workload, seed: int, tokenizer_path: str, context: int) -> dict[str, int]:
    """What `plan` passes over, by reason: conversations too "short" or too "long", requests of a trace that
    "failed". Nothing is ever skipped of other prompts."""
    if workload.trace is None and not is_conversations(workload.prompts):
        return {}
    return dict(ask(workload, seed, tokenizer_path, context).skipped)


def request_seed(seed: int, request: int) -> int:
    """The seed of a request's samples, from the round's: 63 bits."""
    digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
