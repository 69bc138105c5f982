"""What is asked of an engine, and when: plain data, made from a few options and a seed."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from engines.api import BadSetting, pick
from harness.workload import prompts as source
from harness.workload.arrivals import ARRIVALS, SCHEDULES, TIMING_OPTIONS, UNTIMED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["UNTIMED", "Planned", "Workload", "plan"]

Prompt = str | list[int]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The workload options of the command line, by the same names."""

    prompt: str | None = "Hello"  # what every request asks, where `prompts` is not given
    prompts: str | None = None  # a file of one prompt per line, or "english": from Python's documentation
    input_tokens: int | None = None  # prompts joined and cut to exactly this many tokens; None: as they are
    max_new_tokens: int = 128
    num_requests: int = 64
    arrival: str = "fixed"  # one of ARRIVALS
    interval_ms: float = 20.0  # arrival=fixed
    arrival_schedule: str = "absolute"  # arrival=fixed: "absolute" or "relative"
    concurrency: int | None = None  # arrival=closed: requests in flight
    pretok: bool = True  # prompts are sent as token ids: the engine's own tokenizing is not measured
    stop_on_eos: bool = False
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # sample from the most likely so many; 0: from all
    top_p: float = 1.0  # sample from the most likely that hold this share; 1: from all
    stop: list[str] = []  # texts that end a request where its output comes to one

    @property
    def interval_ns(self) -> int:
        return round(self.interval_ms * 1e6)

    def check(self) -> None:
        """Raises BadSetting, one line, where this is no workload."""
        for name in ("max_new_tokens", "num_requests", "input_tokens", "concurrency"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise BadSetting(f"{name} must be at least 1, not {count}")
        if not (math.isfinite(self.interval_ms) and self.interval_ms > 0):
            raise BadSetting(f"interval_ms must be above 0, not {self.interval_ms:g}")
        self._check_timing()
        self._check_sampling()
        if "" in self.stop:
            raise BadSetting("a stop string is empty: it would end every request at once")
        if self.prompts is not None and self.prompt not in (None, DEFAULT.prompt):
            raise BadSetting("prompt and prompts exclude each other: give one of them")
        source.texts(self.prompt, self.prompts, seed=0)

    def _check_sampling(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadSetting(f"temperature must be 0 (greedy) or above, not {self.temperature:g}")
        if self.top_k < 0:
            raise BadSetting(f"top_k must be 0 (all) or above, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise BadSetting(f"top_p must be above 0 and at most 1 (all), not {self.top_p:g}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (0, 1):
            raise BadSetting("top_k and top_p mean something only with a temperature above 0")

    def _check_timing(self) -> None:
        """An option that the way of arriving does not look at would change nothing, silently."""
        pick(self.arrival_schedule, {schedule: schedule for schedule in SCHEDULES}, "arrival_schedule")
        used = pick(self.arrival, ARRIVALS, "arrival").options
        for name in TIMING_OPTIONS:
            if name not in used and getattr(self, name) != getattr(DEFAULT, name):
                fitting = " or ".join(each for each, arrival in ARRIVALS.items() if name in arrival.options)
                raise BadSetting(f"{name} means something only with arrival={fitting}, not {self.arrival}")
        if "concurrency" in used and self.concurrency is None:
            raise BadSetting(f"arrival={self.arrival} needs a concurrency")


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
    few. `tokenizer_path` names a tokenizer.json and may be empty where nothing needs one (neither pretok
    nor input_tokens). Prompt and output together must fit `context` tokens; without a tokenizer that is
    left to the engine. Raises BadSetting.
    """
    texts = source.texts(workload.prompt, workload.prompts, seed)
    distinct = _distinct(workload, texts, tokenizer_path, context)
    return [
        Planned(
            id=index,
            offset_ns=offset,
            prompt=distinct[index % len(distinct)],
            max_new_tokens=workload.max_new_tokens,
            stop_on_eos=workload.stop_on_eos,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=request_seed(seed, index),
            stop=workload.stop,
        )
        for index, offset in enumerate(ARRIVALS[workload.arrival].offsets(workload))
    ]


def request_seed(seed: int, request: int) -> int:
    """The seed of a request's samples, from the round's: 63 bits."""
    digest = blake2b(f"{seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _distinct(workload: Workload, texts: list[str], tokenizer_path: str, context: int) -> list[Prompt]:
    """The different prompts of a round, in the wanted form and length, none too long for the context."""
    wanted = range(min(len(texts), workload.num_requests))
    if not tokenizer_path:
        if workload.pretok or workload.input_tokens is not None:
            option = "pretok" if workload.pretok else "input_tokens"
            raise BadSetting(f"{option} needs the engine's tokenizer, and the engine names none")
        return [texts[index] for index in wanted]
    tokenizer = source.load_tokenizer(tokenizer_path)
    prompts, lengths = zip(*(_sized(workload, texts, index, tokenizer) for index in wanted), strict=True)
    room = context - workload.max_new_tokens
    if max(lengths) > room:
        raise BadSetting(
            f"a prompt of {max(lengths)} tokens is too long: the context of {context} tokens leaves {room} "
            f"beside max_new_tokens={workload.max_new_tokens}"
        )
    return list(prompts)


def _sized(workload: Workload, texts: list[str], index: int, tokenizer: Tokenizer) -> tuple[Prompt, int]:
    """Prompt `index` as it is sent, and its number of tokens."""
    length = workload.input_tokens
    if length is None:
        ids: list[int] = tokenizer.encode(texts[index]).ids
        return (ids if workload.pretok else texts[index]), len(ids)
    find = source.ids_of_length if workload.pretok else source.text_of_length
    return find(texts, index, length, tokenizer), length
